"""Program that plays an environment of the `verifiers` package (0.4 or newer, its module v1).

    PYTHON verifiers_program.py NAME CONFIG rows   # prints the tasks, a line each
    PYTHON verifiers_program.py NAME CONFIG        # reads lines of --agent-command, and answers them

It runs in a Python that has the package, and needs nothing of onpolicy's. CONFIG is the [env] block of
the package's own commands as JSON, with `select`, its choice of tasks, in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

KEY = "ONPOLICY_SESSION_KEY"
"""The variable in which the package's client finds the key of a session."""


def load(name: str, config: str) -> tuple[Any, dict[int, Any]]:
    """Return the environment and its tasks by their numbers. Raises ValueError for no trainable one."""
    import verifiers.v1 as vf

    given = json.loads(config)
    select = vf.SelectConfig(**given.pop("select", {}))
    taskset = {**given.pop("taskset", {}), "id": name}
    environment = vf.load_environment(vf.resolve_env_config({**given, "taskset": taskset}))
    agents = [key for key, value in environment.config if isinstance(value, vf.AgentConfig)]
    if len(agents) > 1:
        raise ValueError(f"it has the agents {', '.join(agents)}, and an episode has one policy")
    tasks = environment.taskset.select(select)
    if not tasks.bounded:
        raise ValueError(
            'its tasks have no end; give {"select": {"limit": 1000}} or another number'
        )
    return environment, {task.data.idx: task for task in tasks}


def row_of(task: Any) -> dict[str, Any]:
    """Return a task as a row of a prompt file, with what finds and proves it again."""
    prompt, system = task.data.prompt, task.data.system_prompt
    if prompt is None or isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt or task.data.name or ""}]
    else:
        prompt = [message.model_dump(mode="json", exclude_none=True) for message in prompt]
    if system:
        prompt = [{"role": "system", "content": system}, *prompt]
    return {"prompt": prompt, "label": "", "task": task.data.idx, "hash": task.hash}


async def play(environment: Any, task: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the answer for an episode. Raises RuntimeError if the package says that it failed."""
    import verifiers.v1 as vf

    if task is None or task.hash != row["metadata"]["hash"]:
        raise RuntimeError(f"task {row['metadata']['task']} is another than at the run's start")
    os.environ[KEY] = row["api_key"]
    client = vf.EvalClientConfig(base_url=row["base_url"], api_key_var=KEY)
    episode = await environment.run_episode(task, vf.ModelContext(row["model"], client))
    if not episode.ok or len(episode.traces) != 1:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = [" ".join(f"{error.type}: {error.message}".split()) for error in errors]
        raise RuntimeError("; ".join(said) or f"it ran {len(episode.traces)} agents")
    (trace,) = episode.traces
    metrics = {
        **trace.metrics,
        **{name: each.value for name, each in trace.rewards.items() if each},
    }
    return {
        "api_key": row["api_key"],
        "reward": trace.reward,
        "metrics": {f"verifiers/{k}": float(v) for k, v in metrics.items() if v is not None},
        "info": {"ended": trace.stop_condition, "is_truncated": trace.is_truncated},
    }


async def serve(name: str, config: str, say: Any) -> None:
    """Play an episode for each line of standard input."""
    environment, tasks = load(name, config)
    async with environment.serving():
        while line := await asyncio.to_thread(sys.stdin.readline):
            row = json.loads(line)
            say(await play(environment, tasks.get(row["metadata"]["task"]), row))


def main(name: str, config: str, *rows: str) -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=output, flush=True)

    try:
        if rows:
            for task in load(name, config)[1].values():
                say(row_of(task))
        else:
            asyncio.run(serve(name, config, say))
    except Exception as error:  # its last line is what the run quotes
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
