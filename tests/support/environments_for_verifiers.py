"""Environments of the `verifiers` package, as its users write them; loaded by that name."""

import verifiers as vf
from datasets import Dataset


def product(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def is_short(completion) -> float:
    return 1.0 / (1 + len(completion[-1].content or ""))


def raises(completion) -> float:
    raise KeyError("no such reward")


def compares(completions, answers) -> list[float]:
    return [0.0 for _ in completions]


class Asks(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"{len(messages)}?"}]


class Dies(Asks):
    async def env_response(self, messages, state, **kwargs):
        raise vf.InfraError("the sandbox is gone")


def load_environment(kind: str = "asks", reward: str = "is_short", max_turns: int = 3):
    rows = [{"question": f"{a}*3=", "answer": str(3 * a), "info": {"a": a}} for a in range(4)]
    rubric = vf.Rubric(funcs=[globals()[reward]])
    given = {"dataset": Dataset.from_list(rows), "rubric": rubric}
    if kind == "tools":
        return vf.ToolEnv(tools=[product], max_turns=max_turns, **given)
    if kind == "single":
        return vf.SingleTurnEnv(**given)
    return {"asks": Asks, "dies": Dies}[kind](max_turns=max_turns, **given)
