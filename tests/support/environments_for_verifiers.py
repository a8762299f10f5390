"""Tasksets of the `verifiers` package that cannot be trained on, or fail; loaded by that name."""

import itertools

import verifiers.v1 as vf

__all__ = ["Fails"]


class FailsTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward()
    async def raises(self, trace) -> float:
        raise KeyError("no such reward")


class FailsConfig(vf.TasksetConfig):
    count: int = 2
    """The number of tasks; 0: without end."""


class Fails(vf.Taskset[FailsTask, FailsConfig]):
    @property
    def INFINITE(self):
        return not self.config.count

    def load(self):
        for n in range(self.config.count) if self.config.count else itertools.count():
            messages = [{"role": "user", "content": f"{n}?"}]
            yield FailsTask(
                vf.TaskData(prompt=messages, system_prompt="Be brief."), self.config.task
            )
