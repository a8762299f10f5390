"""The console of a command: what it is doing, and for how long it has run. Imports nothing heavy.

Lines go to standard error, so that results on standard output stay clean. They stand behind the time
since the command began:

    [0:00:11] starting 1 SGLang server; its log: runs/train/logs/engine_0.log
"""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from typing import TextIO

from onpolicy.errors import visible

_BEGAN = time.monotonic()
"""When this process began, Python's own start left out: a command imports this module first."""

OURS = ("onpolicy", "benchmarks")
"""Packages whose lines do not name where they come from."""

NOISY = ("httpx", "matplotlib", "megatron", "sglang")


def elapsed() -> float:
    """Seconds since the command began."""
    return time.monotonic() - _BEGAN


def duration(seconds: float) -> str:
    """Whole seconds as hours, minutes and seconds. Example: '0:01:07'"""
    return str(timedelta(seconds=int(seconds)))


def configure_logging() -> None:
    """Log to the console; the run directory adds a file, which also takes debug messages."""
    console = _Console()
    console.setFormatter(_Lines())
    console.setLevel(logging.INFO)
    log_to(console)


def log_to(*handlers: logging.Handler) -> None:
    """Let these, and no others, take what this process logs: of onpolicy debug messages too."""
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.getLogger("onpolicy").setLevel(logging.DEBUG)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


class _Console(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the time: a progress bar puts itself in its place."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """The base class sets one when it is made."""


class Visible(logging.Formatter):
    """A formatter of lines that a terminal only shows, whoever wrote what they quote."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Lines(Visible):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        source = "" if record.name.split(".")[0] in OURS else f"{record.name}: "
        return f"[{duration(elapsed())}] {level}{source}{super().format(record)}"
