"""Episodes that are drawn without engines: a function answers what they ask for."""

import threading

from onpolicy.rollout.episode_jobs import EpisodesJob

PATIENCE = 100.0
"""Seconds without a request after which a test gives up."""


def asked_for(job):
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


def drive(job, answer):
    """Answer all that a job asks for."""
    for number in asked_for(job):
        job.add(number, answer(job.requests[number]))


class Part(EpisodesJob):
    """Episodes until each has sampled `most` more tokens on its first branch, where a push may interrupt
    it; None: to their ends. An episode that has forked is sampled to its end."""

    def __init__(self, episodes, most, version, *, by_token=False):
        super().__init__(version, by_token=by_token)
        self._most = most
        self.begin(episodes)

    def asked(self, branch):
        episode, most = branch.episode, self._most
        if most is None or len(episode.branches) > 1:
            self._ask(branch, None)
        elif (sampled := branch.trajectory.num_sampled - episode.sampled_before) < most:
            self._ask(branch, most - sampled)
        else:
            self._leave(episode)

    def cut(self, branch):
        self.asked(branch)
