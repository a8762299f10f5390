"""Worker processes, while they start and end."""

import os

from pebble.pool.process import WorkerManager

from onpolicy.config.groups import RewardConfig
from onpolicy.rewards.workers import Workers
from onpolicy.system import private_directory
from tests.support.samples import to_score as sample


class Held(str):
    """The name of a rule, which a worker that starts waits for, at a pipe under that name."""

    def __reduce__(self):
        return wait_for, (str(self),)


def wait_for(pipe):
    with open(pipe, "rb") as held:
        held.read()
    return "exact"


def semaphores():
    name = private_directory.of_this_process().path.name
    return {*private_directory.SHARED_MEMORY.glob(f"sem.{name}*")}


def test_a_worker_that_still_starts_when_its_pool_closes_says_nothing(tmp_path, monkeypatch, capfd):
    os.mkfifo(tmp_path / "pipe")
    ended, end = [], WorkerManager.force_stop_workers

    def let_it_start_first(manager):
        (process,) = manager.workers.values()
        os.close(held)
        process.join()
        ended.append(process)
        end(manager)

    monkeypatch.setattr(WorkerManager, "force_stop_workers", let_it_start_first)
    before = semaphores()
    workers = Workers(RewardConfig(), [Held(tmp_path / "pipe")], count=1)
    workers.ask("exact", [[sample("42")]])
    held = os.open(tmp_path / "pipe", os.O_WRONLY)  # waits until the worker is there
    workers.close()
    assert len(ended) == 1
    assert semaphores() == before
    assert capfd.readouterr().err == ""
