"""The number of files, connections among them, that a process may have open at a time."""

import resource

BESIDE = 512
"""Files of a process beside its connections to engines: libraries, logs, Ray."""


def allow_connections(count: int) -> int | None:
    """Raise the soft limit of open files where `count` connections need it. Return the hard limit if
    that is too low for them, else None."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + BESIDE <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count + BESIDE, hard))
    return hard if hard < count + BESIDE else None
