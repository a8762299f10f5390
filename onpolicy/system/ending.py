"""The end of a command on SIGTERM or Ctrl-C, or after the loss of something that it needs.

Another thread notices a loss and sends SIGTERM, too, which reaches the main thread wherever it waits.
The main thread then leaves all its contexts, which end servers and remove temporary files. Python drops
an exception that reaches it in a destructor, so a timer ends a command that goes on.
"""

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from onpolicy.errors import OnPolicyError

SECONDS = 20.0
"""The most seconds that a command may take to end. SLURM and Kubernetes kill 30 s after SIGTERM; after a
kill the servers' guards clean up."""

HEARD_SECONDS = 3.0
"""The most seconds for the main thread to notice a loss; in C++, as in a Ray call, it does not."""

ASKED = (
    "SIGTERM: this command was asked to end, by somebody or by a scheduler of jobs, and ends now. A run "
    "with --save goes on from its last checkpoint when it is started again with --load."
)

_loss: OnPolicyError | None = None
_is_heard = False
_is_ending = threading.Event()


class Ended(SystemExit):
    """The early end of a command, which has been reported, with its exit code."""


@contextmanager
def heard() -> Iterator[None]:
    """Report at once, and raise Ended in the main thread, when SIGTERM comes or something is lost;
    raise KeyboardInterrupt at Ctrl-C. Do nothing in other threads, which get no signals."""
    global _loss, _is_heard
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    ended: Ended | None = None

    def end(number: int, _: FrameType | None) -> None:
        nonlocal ended
        signal.signal(number, signal.SIG_DFL)  # a second one ends this process at once
        if os.getpid() != owner:  # a worker that was forked
            os.kill(os.getpid(), number)
            return
        _is_ending.set()
        _end_by_then(SECONDS, number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        code, words = _told(number)
        os.write(2, f"\n{words}\n".encode())  # the interrupted code may hold sys.stderr's lock
        ended = Ended(code)
        raise ended

    # A shell lets the commands of its background ignore Ctrl-C.
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, end) for number in numbers}
    _loss, _is_heard = None, True
    _is_ending.clear()
    try:
        yield
    except BaseException as error:  # Ray may raise a SystemExit of its own instead
        if ended is not None and error is not ended:
            raise ended from error
        raise
    finally:
        _is_heard = False
        for number, handler in before.items():
            signal.signal(number, handler)


def lose(error: OnPolicyError) -> None:
    """End this command with an error, from another thread than the main one. Do nothing outside
    `heard`. If the main thread does not react, exit without it; guards clean up."""
    global _loss
    if not _is_heard:
        return
    _loss = error
    os.kill(os.getpid(), signal.SIGTERM)
    if not _is_ending.wait(HEARD_SECONDS):
        code, words = _told(signal.SIGTERM)
        os.write(2, f"\n{words}\n".encode())
        os._exit(code)


def _told(number: int) -> tuple[int, str]:
    if _loss is None:
        return 128 + number, ASKED
    return 1, f"{type(_loss).__name__}: {_loss}"


def _end_by_then(seconds: float, number: int) -> None:
    """Let the signal kill this process, and say where it stands, if it runs after so many seconds."""

    def kill() -> None:
        words = f"This command did not end within {seconds:g} s of {signal.Signals(number).name}."
        os.write(2, f"\n{words} It is killed; guards end its servers. It stood at:\n".encode())
        faulthandler.dump_traceback(2)
        os.kill(os.getpid(), number)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
