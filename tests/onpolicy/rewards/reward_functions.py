"""Functions that workers of tests score with. Every worker imports this file, so it imports little."""

import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path


def length_or_hang(sample):
    if sample.response == "hang":
        time.sleep(600)
    while sample.response == "spin":
        pass
    return {"score": len(sample.response), "half": len(sample.response) / 2}


def meets_others(sample):
    """Comes back when as many samples as there are in all are being scored at the same time."""
    place = Path(sample.prompt.metadata["directory"])
    (place / sample.response).touch()
    while len(list(place.iterdir())) < sample.prompt.metadata["count"]:
        time.sleep(0.01)
    return 1.0


def slow_for_some(sample):
    time.sleep(0.05 * (len(sample.response) % 3))
    return len(sample.response)


class NoNumber:
    def __float__(self):
        raise RuntimeError("two elements")


MISDEEDS = {
    "raises": lambda: 1 / 0, "exits": lambda: sys.exit(3), "dies": lambda: os._exit(3),
    "crashes": lambda: ctypes.string_at(0), "none": lambda: None, "text": lambda: "1.0",
    "nan": lambda: float("nan"), "huge": lambda: 10**400, "no score": lambda: {"other": 1.0},
    "number as a name": lambda: {"score": 1.0, 2: 3.0}, "no scalar": NoNumber,
}  # fmt: skip


def misbehaves(sample):
    return MISDEEDS[sample.response]() if sample.response in MISDEEDS else 1.0


def takes_two(sample, label):
    return 1.0


async def asynchronous(sample):
    return 1.0


a_lambda = lambda sample: 2.0  # noqa: E731


def ranks(samples):
    """The place of each by its length, and a misdeed if the first response asks for it."""
    lengths = [len(sample.response) for sample in samples]
    places = [float(sum(other < length for other in lengths)) for length in lengths]
    misdeeds = {
        "raises": lambda: 1 / 0, "number": lambda: 1.0, "none": lambda: None,
        "short": lambda: places[1:], "dict": lambda: dict.fromkeys("ab", 1.0),
        "nan": lambda: [float("nan"), *places[1:]],
    }  # fmt: skip
    says = misdeeds.get(
        samples[0].response, lambda: [{"score": x, "of": len(samples)} for x in places]
    )
    return says()


def half_the_length(sample):
    if sample.response == "raises":
        raise LookupError("gone")
    return {"score": len(sample.response) / 2, "is_short": len(sample.response) < 3}


def halves(sample):
    return {"score": 2.0, "token_weights": [0.5] * len(sample.response_ids), "of": 1}


def ones(sample):
    return {"score": 1.0, "token_weights": (1,) * len(sample.response_ids)}


def others(sample):
    count = len(sample.response_ids)
    return {"score": 1.0, "token_weights": {"kl_loss": [0.0] * count, "entropy": [2.0] * count}}


def by_place(samples):
    return [{"score": i, "token_weights": [i] * 3} for i in range(len(samples))]


MISFITS = {
    "short": [1.0, 1.0], "below 0": [1.0, -0.5, 1.0], "nan": [1.0, math.nan, 1.0],
    "infinite": [1.0, math.inf, 1.0], "text": "111", "texts": ["1", "1", "1"], "number": 1.0,
    "nothing": {"kl_loss": None}, "no term": {"kl": [1.0] * 3},
    "of what it made itself": [1.0, 1.0],
}  # fmt: skip


def misfits(sample):
    if sample.response == "of what it made itself":
        sample.trajectory = sample.trajectory.until(len(sample.token_ids) - 1)
    return {"score": 1.0, "token_weights": MISFITS[sample.response]}


def signals_and_hangs(sample):
    Path(sample.prompt.metadata["started"]).write_text(str(os.getpid()))
    time.sleep(600)


def dies_once(sample):
    if sample.response == "dies":
        mark = Path(sample.prompt.metadata["marks"], "died")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return len(sample.response)


def stops_itself(sample):
    pipe = Path(sample.prompt.metadata["pid"])
    pipe.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def spins(sample):
    while sample.response == "spins":
        pass
    if sample.response == "spins in C":
        9 ** (9**9)
    return 1.0
