"""The trainer as its controller sees it: one call is the same call on all ranks.

A call of the ranks may take hours, so there is no time limit for it; hung ranks are detected by the
processor time that they use. A rank that computes, copies, reads or drives a GPU uses a processor, while
a stopped one, or one that waits in a gloo collective, uses next to none; if all ranks are such, none
will end the wait. (Ranks that wait in an NCCL collective use a processor; NCCL's own limit ends them.)
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayActorError

from onpolicy.cluster import ray_environment
from onpolicy.cluster.placement import Host, Slot
from onpolicy.cluster.ray_session import alive_hosts, told_by
from onpolicy.cluster.trainer_rank import Answer, TrainerRank
from onpolicy.compat.process import STRICT_SUMS
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import VARIABLES, NumericsContract
from onpolicy.errors import ConfigError, ContractError, OnPolicyError, TrainerLostError
from onpolicy.images.placed import PlacedImage
from onpolicy.system.network import LOOPBACK
from onpolicy.training.base import Rescored, Trainer, TrainerMemory
from onpolicy.training.policy_trainer import PolicyTrainer
from onpolicy.training.shares import Outcomes, make_shares
from onpolicy.types import Sample, TrainOutcome
from onpolicy.weights.push import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRACE = 5.0
"""The seconds after a rank's failure in which the loss of another rank may turn out to be its cause."""

POLL = 1.0
"""The seconds between two looks at ranks that do not answer, and at the cluster."""

LEAVE = 5.0
"""The seconds that the ranks have to remove their files before they are killed."""

LEAST_SHARE = 0.01
"""The least share of a processor that a working rank uses; Ray's threads in an idle one took 0.001 to
0.004, on an Intel Xeon."""

LOOKS = 4
"""The number of looks within the time after which ranks count as hung."""

SAYS_AFTER = 60.0

Look = tuple[float, str]
"""The seconds of processor time that a process has used, and its state in Linux's words."""


class TrainerRanks(Trainer):
    """The trainer's ranks, one Ray process in each slot; each rank gets its own shard of the samples
    only.

    The first failure of a rank ends a call, since the others may wait for that rank for ever. Its error
    is raised here with its own class and its traceback. A rank that is gone, or hangs (--rank-timeout),
    raises TrainerLostError; a cluster that this host has left, EngineError."""

    def __init__(
        self,
        config: TrainConfig,
        contract: NumericsContract,
        logs: Path,
        slots: Sequence[Slot],
    ):
        """Start the ranks. logs: a directory, the same on every host, for a log file of each rank."""
        self.config = config
        self._logs = [(logs / f"trainer_{rank}.log").absolute() for rank in range(len(slots))]
        self._processes: list[tuple[Host, int]] = []
        self._actors = [self._start(rank, slot) for rank, slot in enumerate(slots)]
        gpus = [slot.devices[0] if slot.devices else None for slot in slots]
        try:
            self._join(slots)
            self._shares = self._call_each(TrainerRank.make, [(config, contract, g) for g in gpus])
            self._compare_self_checks()
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, slot: Slot) -> Any:
        actor = ray_environment.on_host(ray.remote(TrainerRank), slot.host.name)
        threads = self.config.engine.cpu_threads or slot.cpu_threads
        variables = _chosen_sums() | VARIABLES.get(self.config.operators.operators, {})
        return actor.remote(rank, str(self._logs[rank]), threads, os.getcwd(), variables)

    def _join(self, slots: Sequence[Slot]) -> None:
        """Form the group of all ranks, at an address of rank 0's host."""
        pids = self._call_each(TrainerRank.process_id, [()] * len(slots))
        self._processes = [(slot.host, pid) for slot, pid in zip(slots, pids, strict=True)]
        hosts = {slot.host for slot in slots}
        address = slots[0].host.address if len(hosts) > 1 else LOOPBACK[0]
        port = self._call_each(TrainerRank.open_store, [(address,)])[0]
        self._call_each(TrainerRank.join, [(address, port, len(slots))] * len(slots))

    def _compare_self_checks(self) -> None:
        self.self_check, *others = self.on_each_rank(attrgetter("self_check"))
        for rank, other in enumerate(others, start=1):
            if other != self.self_check:
                differ = sorted(k for k, v in self.self_check.items() if other.get(k) != v)
                raise ContractError(
                    f"operators={differ} give other bits on rank {rank} of the trainer than on rank 0. "
                    "All ranks must run on the same kind of processor with the same version of torch."
                )

    def train(self, samples: Sequence[Sample], step: int, rates: Sequence[float]) -> TrainOutcome:
        flags, num_ranks = self.config.trainer, max(self._shares) + 1
        most, shared = flags.max_tokens_per_gpu, flags.shares_prefixes
        shares = make_shares(samples, len(rates), num_ranks, most, shared)
        outcomes = Outcomes.of(samples, len(rates))
        mine = [(shares[i], outcomes, step, rates) for i in self._shares]
        return self._ask_each(PolicyTrainer.train_share, mine)[0]

    def adapt(self, contract: NumericsContract, fallback: FallbackConfig, centers: bool) -> None:
        self.on_each_rank(PolicyTrainer.adapt, contract, fallback, centers)
        self._compare_self_checks()

    def rescore(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float,
        kept_tokens: Sequence[list[bytes]] = (),
        seeds: Sequence[int] = (),
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> list[Rescored]:
        asked = sequences, prompt_lens, temperature, kept_tokens, seeds, images
        return self.on_each_rank(PolicyTrainer.rescore, *asked)[0]

    def on_each_rank(self, function: Callable[..., T], *args: Any) -> list[T]:
        return self._ask_each(function, [args] * len(self._actors))

    def push(self, engines: Sequence[Engine], version: int) -> str:
        return self.on_each_rank(PolicyTrainer.push, engines, version)[0]

    def push_again(self, engines: Sequence[Engine], version: int) -> str:
        return self.on_each_rank(PolicyTrainer.push_again, engines, version)[0]

    def export(self, directory: Path) -> None:
        self.on_each_rank(PolicyTrainer.export, directory.absolute())

    def save(self, directory: Path) -> None:
        self.on_each_rank(PolicyTrainer.save, directory.absolute())

    def load(self, directory: Path) -> None:
        self.on_each_rank(PolicyTrainer.load, directory.absolute())

    def release_memory(self, kind: TrainerMemory) -> None:
        self.on_each_rank(PolicyTrainer.release_memory, kind)

    def close(self) -> None:
        """End the ranks; kill those that do not end by themselves."""
        ends = {actor.leave.remote(): actor for actor in self._actors}
        _, stuck = ray.wait(list(ends), num_returns=len(ends), timeout=LEAVE)
        for end in stuck:
            ray.kill(ends[end])
        self._actors = []

    def _ask_each(self, method: Callable[..., T], args: Sequence[tuple[Any, ...]]) -> list[T]:
        """Call as `on_each_rank` does, with separate arguments for each rank."""
        pairs = zip(self._actors, args, strict=True)
        return self._gathered([actor.ask.remote(method, *own) for actor, own in pairs])

    def _call_each(self, method: Callable[..., T], args: Sequence[tuple[Any, ...]]) -> list[T]:
        """Call a method of `TrainerRank` on the first ranks; return their results."""
        pairs = zip(self._actors, args, strict=False)
        return self._gathered([actor.call.remote(method, *own) for actor, own in pairs])

    def _gathered(self, calls: list[Any]) -> list[Any]:
        """Return the results of the calls of the first ranks; raise the first failure."""
        results: list[Any] = [None] * len(calls)
        ranks = {call: rank for rank, call in enumerate(calls)}
        waiting, watch = list(calls), self._watch()
        while waiting:
            done, waiting = ray.wait(waiting, timeout=POLL)
            if not done:
                alive_hosts()  # raises: without a node here the call would never end
                watch.require_work()
                continue
            if waiting:  # the first alone was waited for, since it may have failed
                more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
                done += more
            for number, call in enumerate(done):
                answer = self._answer(ranks[call], call)
                if answer.error is not None:
                    self._blame_the_lost(calls, done[number + 1 :] + waiting, answer.error)
                    raise answer.error from RankTraceback(ranks[call], answer.traceback)
                results[ranks[call]] = answer.result
        return results

    def _watch(self) -> HungRanks | NotStarted:
        """Return the watch that ends the wait for a call that begins now."""
        engine = self.config.engine
        if not self._processes:
            return NotStarted(engine.rollout_start_timeout, str(self._logs[0].parent))
        # A rank that pushes waits for servers, which may take this long to answer.
        seconds = max(self.config.cluster.rank_timeout, engine.rollout_health_timeout)
        return HungRanks(self._processes, seconds)

    def _answer(self, rank: int, done: Any) -> Answer:
        """Return a rank's answer, and log its log records here."""
        try:
            answer: Answer = ray.get(done)
        except RayActorError as error:
            raise TrainerLostError(
                f"rank {rank} of the trainer ended by itself, or was killed. Its log may say why: "
                f"{self._logs[rank]}. Resume with --load, or let the run do so (--max-rank-restarts)."
            ) from error
        for record in answer.records:
            logging.getLogger(record.name).handle(record)
        return answer

    def _blame_the_lost(self, calls: list[Any], waiting: list[Any], error: Exception) -> None:
        """Raise TrainerLostError if a rank is gone, which causes the others' failures."""
        if isinstance(error, OnPolicyError):
            return
        deadline = time.monotonic() + GRACE
        while waiting and (left := deadline - time.monotonic()) > 0:
            done, waiting = ray.wait(waiting, timeout=left)
            for call in done:
                self._answer(calls.index(call), call)


class RankTraceback(Exception):
    """The traceback of an error in a rank's process."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"rank {rank} of the trainer\n{text}")


def _chosen_sums() -> dict[str, str]:
    """Return the variable of MKL's mode, if this process has another one than onpolicy's."""
    name, ours = STRICT_SUMS
    mode = os.environ.get(name, ours)
    return {} if mode == ours else {name: mode}


class HungRanks:
    """The observations of the ranks' processes during a call."""

    def __init__(self, ranks: Sequence[tuple[Host, int]], seconds: float):
        """Observe ranks (host, process id), which count as hung after `seconds` without work."""
        self._ranks, self._seconds = ranks, seconds
        self._next_look = time.monotonic() + seconds / LOOKS
        self._before: list[Look] = []
        self._worked = 0.0

    def require_work(self) -> None:
        """Raise TrainerLostError, and kill the ranks, if no rank has worked for too long."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + self._seconds / LOOKS
        try:
            looks = self._look()
        except ConfigError as error:  # a host is being lost, which the calls of its ranks report
            logger.debug("%s", error)
            return
        used = [look[0] - before[0] for look, before in zip(looks, self._before, strict=False)]
        if not used or max(used) > LEAST_SHARE * (now - self._worked):
            self._before, self._worked = looks, now
        elif now - self._worked >= self._seconds:
            with suppress(ConfigError):
                self._on_each_host(kill, "that its ranks of the trainer are gone")
            raise TrainerLostError(self._words(looks, now - self._worked))
        else:
            logger.warning(
                "no rank of the trainer has computed for %.0f s; they count as hung after %g s "
                "(--rank-timeout)", now - self._worked, self._seconds,
            )  # fmt: skip

    def _look(self) -> list[Look]:
        found = self._on_each_host(look_at, "what its ranks of the trainer do")
        return [found[host][pid] for host, pid in self._ranks]

    def _on_each_host(self, ask: Callable[[list[int]], Any], what: str) -> dict[Host, Any]:
        pids = defaultdict(list)
        for host, pid in self._ranks:
            pids[host].append(pid)
        here: dict[Host, Any] = {}
        for host, own in pids.items():
            here |= told_by([host], partial(ask, own), what)
        return here

    def _words(self, looks: Sequence[Look], seconds: float) -> str:
        states = ", ".join(f"rank {rank} ({state})" for rank, (_, state) in enumerate(looks))
        return (
            f"--rank-timeout={self._seconds:g}: no rank of the trainer has computed for {seconds:.0f} "
            f"s: {states}. One that is stopped, or waits for a disk or for another rank, holds up all. "
            "They were ended. Resume with --load, or let the run do so (--max-rank-restarts); give more "
            "seconds if they were waiting for something slow."
        )


def look_at(pids: Sequence[int]) -> dict[int, Look]:
    """Return processor time and state of processes on this host; (0.0, "gone") for ended ones."""
    found: dict[int, Look] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            found[pid] = times.user + times.system, process.status()
        except psutil.Error:
            found[pid] = 0.0, "gone"
    return found


def kill(pids: Sequence[int]) -> None:
    """Kill processes of this host."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class NotStarted:
    """The wait for ranks whose processes have not answered yet."""

    def __init__(self, seconds: float, logs: str):
        """Start the wait. seconds: the limit on it; logs: the place of the ranks' log files."""
        self._seconds, self._logs, self._began = seconds, logs, time.monotonic()
        self._says_at = self._began + SAYS_AFTER

    def require_work(self) -> None:
        """Raise TrainerLostError after too long a wait; log from time to time."""
        now = time.monotonic()
        if now - self._began >= self._seconds:
            raise TrainerLostError(
                f"--rollout-start-timeout={self._seconds:g}: the processes of the trainer's ranks have "
                f"not started in that time. Their logs may say why: {self._logs}. A host that is busy "
                "or short of memory is the common cause: try again, or give more time."
            )
        if now >= self._says_at:
            self._says_at = now + SAYS_AFTER
            logger.info("waiting for the trainer's ranks to start, for %.0f s", now - self._began)
