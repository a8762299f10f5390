"""Console of a command: current activity and elapsed time. It imports nothing heavy.

Lines go to standard error, so that results on standard output stay clean. Each begins with the time
since the command began:

[0:00:11] starting 1 SGLang server; its log: runs/train/logs/engine_0.log
"""

import logging
import sys
import time
from datetime import timedelta
from typing import TextIO

from onpolicy.errors import visible

_BEGAN = time.monotonic()
"""The time at which this process began, less Python's own start: a command imports this first."""

NOISY = ("alembic", "httpx", "megatron", "mlflow", "sglang")


def elapsed() -> float:
    """Return the seconds since the command began."""
    return time.monotonic() - _BEGAN


def duration(seconds: float) -> str:
    """Return whole seconds as hours, minutes and seconds. Example: '0:01:07'"""
    return str(timedelta(seconds=int(seconds)))


def configure_logging() -> None:
    """Log to the console; the run directory adds a file, which also takes debug messages."""
    console = _Console()
    console.setFormatter(_Lines())
    console.setLevel(logging.INFO)
    log_to(console)


def log_to(*handlers: logging.Handler) -> None:
    """Send this process's log to these handlers alone, with debug messages of onpolicy."""
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.getLogger("onpolicy").setLevel(logging.DEBUG)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Console(logging.StreamHandler[TextIO]):
    """A handler for the current standard error: a progress bar replaces it temporarily."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore the stream that the base class sets when it is made."""


class Visible(logging.Formatter):
    """A formatter whose lines are safe to show in a terminal, whoever wrote the text they quote."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Lines(Visible):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        source = "" if record.name.split(".")[0] == "onpolicy" else f"{record.name}: "
        return f"[{duration(elapsed())}] {level}{source}{super().format(record)}"
