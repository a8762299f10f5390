"""A trainer in a process of its own, on libraries as they come: MKL is not asked there for what
`onpolicy` asks it for, and no user of stock PyTorch does."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from onpolicy.compat.process import STRICT_SUMS
from onpolicy.train.policy_trainer import PolicyTrainer

T = TypeVar("T")

MakeTrainer = Callable[[], PolicyTrainer]

Ask = Callable[[Callable[[PolicyTrainer], Any]], Any]
"""What a function says of a trainer, wherever that is. It is pickled: a module has it by name."""


@contextmanager
def trainer_apart(make: MakeTrainer) -> Iterator[Ask]:
    """Have a trainer made and asked in another process, which ends with this."""
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
    name, strict = STRICT_SUMS
    if os.environ.get(name) == strict:
        del os.environ[name]  # MKL reads it before its first product
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


def mkl_mode(_: PolicyTrainer) -> str | None:
    """Return what the environment of this process asks MKL for."""
    return os.environ.get(STRICT_SUMS[0])
