"""Calls in threads that the end of a program does not wait for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(call: Callable[[], Result], name: str | None = None) -> Future[Result]:
    """Begin a call in a daemon thread of this name; return its result, or the error that it raised."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # is raised where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
