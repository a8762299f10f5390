"""An OpenEnv server, by the package alone: it says an episode's sum, and ends it after three actions.

python openenv_server.py        # prints its port
"""

import socket

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


if __name__ == "__main__":
    app = create_fastapi_app(Adds, Number, Sum, max_concurrent_envs=8)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
