"""An OpenEnv server, by the package alone: it says an episode's sum, and ends it after three actions.

python openenv_server.py        # prints its port
python openenv_server.py tools  # whose actions are calls of MCP tools
"""

import socket
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Number(Action):
    number: str
    times: int = 1


class Sum(Observation):
    text: str


class Adds(Environment):
    """Adds the lengths of what it is told, and pays for them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, begin=0, **more):
        self.sum, self.steps = begin, 0
        return Sum(text=f"{self.sum}|")

    def step(self, action, timeout_s=None, **more):
        if "z" in action.number:
            raise ValueError("z is no number")
        self.sum += len(action.number) * action.times
        self.steps += 1
        return Sum(text=f"{self.sum}|", reward=float(self.sum), done=self.steps == 3)

    @property
    def state(self):
        return State(step_count=self.steps)


def tools_app():
    """A tool that adds to a sum, paid as above; two calls are enough."""
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Tools(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            server = FastMCP("sum")
            self.sum = self.calls = 0

            @server.tool()
            def add(number: int) -> str:
                """Adds a number to the sum."""
                self.sum += number
                self.calls += 1
                return f"sum {self.sum}"

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **more):
            return Sum(text="add")

        async def step_async(self, action, timeout_s=None, **more):
            found = await super().step_async(action, timeout_s=timeout_s, **more)
            if isinstance(action, CallToolAction):
                found.reward, found.done = float(self.sum), self.calls == 2
            return found

        def _step_impl(self, action, timeout_s=None, **more):
            raise ValueError("only tools act")

        @property
        def state(self):
            return State(step_count=self.calls)

    return create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=8)


if __name__ == "__main__":
    if sys.argv[1:] == ["tools"]:
        app = tools_app()
    else:
        app = create_fastapi_app(Adds, Number, Sum, max_concurrent_envs=8)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
