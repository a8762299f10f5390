"""Processes on libraries with their defaults: `onpolicy` sets MKL's mode, and users of stock PyTorch
and SGLang do not."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from onpolicy.compat.process import STRICT_SUMS
from onpolicy.contract import NO_SPLIT_K
from onpolicy.training.policy_trainer import PolicyTrainer

T = TypeVar("T")

USUAL_SUMS = ""
"""The value of MKL's variable that is no mode: it counts as unset for MKL, and as set for
`prepare_process` in a process that is started. `OFF` is none: MKL then takes `AUTO`."""

MakeTrainer = Callable[[], PolicyTrainer]

Ask = Callable[[Callable[[PolicyTrainer], Any]], Any]
"""A function that calls another function on a trainer, wherever that is, and returns the result.
The function is pickled, so a module must have it by name."""


@contextmanager
def trainer_apart(make: MakeTrainer) -> Iterator[Ask]:
    """Make a trainer in another process, and yield a function that calls functions on it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make), daemon=True)
    process.start()
    theirs.close()

    def ask(function: Callable[[PolicyTrainer], T]) -> T:
        ours.send(function)
        answer, error = ours.recv()
        if error is not None:
            raise error
        result: T = answer
        return result

    try:
        yield ask
    finally:
        ours.close()
        process.join()


def _serve(pipe: Connection, make: MakeTrainer) -> None:
    """Answer until the other end is closed."""
    _take_usual_sums()  # MKL reads it before its first product
    trainer = None
    while True:
        try:
            function = pipe.recv()
        except EOFError:
            return
        try:
            trainer = trainer or make()
            pipe.send((function(trainer), None))
        except Exception as error:
            pipe.send((None, error))


@contextmanager
def as_users_start_it(kind: str) -> Iterator[None]:
    """Within the context start servers and ranks of this kind of operators under their users' variables
    of MKL and cuBLAS: a stock one without onpolicy's."""
    names = {STRICT_SUMS[0], *NO_SPLIT_K} & os.environ.keys()
    before = {name: os.environ[name] for name in names}
    if kind != "aligned":
        _take_usual_sums()
    try:
        yield
    finally:
        os.environ.update(before)


def _take_usual_sums() -> None:
    """Take what onpolicy asks of MKL and of cuBLAS out of the environment; what the user chose stays."""
    name, strict = STRICT_SUMS
    if os.environ.get(name) == strict:
        os.environ[name] = USUAL_SUMS
    for name, value in NO_SPLIT_K.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def mkl_mode(_: PolicyTrainer) -> str | None:
    """Return the MKL mode in the environment of this process."""
    return os.environ.get(STRICT_SUMS[0])
