"""Episodes that are drawn without engines: a function answers what they ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from onpolicy.rollout.base import SamplingJob
from onpolicy.trajectory import Completion
from onpolicy.types import Request

PATIENCE = 100.0
"""Seconds without a request after which a test gives up."""


def asked_for(job: SamplingJob) -> Iterator[int]:
    """Numbers of the requests without an answer, one at a time, until the job is done."""
    news = threading.Event()
    job.on_news = news.set
    while True:
        news.clear()
        if job.error is not None:
            raise job.error
        if job.is_done:
            return
        if missing := job.missing:
            yield missing[0]
        else:
            assert news.wait(PATIENCE), "nobody asks for anything"


def drive(job: SamplingJob, answer: Callable[[Request], Completion]) -> None:
    """Answer all that a job asks for."""
    for number in asked_for(job):
        job.add(number, answer(job.requests[number]))
