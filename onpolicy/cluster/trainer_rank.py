"""A rank of the trainer, in a process that Ray started for it.

The process is prepared before any heavy import, so this module imports nothing heavy. The rank logs into
a file of its own; lines for the user also go back with each answer.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onpolicy.cluster import ray_environment
from onpolicy.compat.light_imports import import_transformers
from onpolicy.compat.process import collect_rarely, prepare_process
from onpolicy.errors import OnPolicyError
from onpolicy.outputs.console import log_to

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from onpolicy.config import TrainConfig
    from onpolicy.contract import NumericsContract
    from onpolicy.training.policy_trainer import PolicyTrainer

LINE = "[%(asctime)s] %(levelname)s: %(name)s: %(message)s"


@dataclass(slots=True, kw_only=True)
class Answer:
    """The outcome of one call of a rank."""

    result: Any = None
    error: Exception | None = None
    traceback: str = ""

    records: list[logging.LogRecord] = field(default_factory=list)


class TrainerRank:
    """A rank. A call may be collective: then all ranks have to be called alike."""

    trainer: PolicyTrainer

    def __init__(
        self,
        rank: int,
        log_file: str,
        num_threads: int,
        directory: str,
        variables: Mapping[str, str],
    ):
        """Prepare the process. directory: the controller's working directory; variables: environment
        variables that the rank computes under."""
        ray_environment.work_in(directory)
        self.rank, self.num_threads = rank, num_threads
        os.environ.update(variables)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)  # else Ray gives an actor one thread
        prepare_process()
        _write_into(Path(log_file))
        self._records = _RecordList(logging.WARNING if rank else logging.INFO)
        log = logging.StreamHandler()
        log.setFormatter(logging.Formatter(LINE))
        log_to(log, self._records)
        self._store: TCPStore | None = None
        collect_rarely()
        import_transformers()

    def call(self, method: Callable[..., Any], *args: Any) -> Answer:
        """Call a method of this class on this rank."""
        return self._answer(lambda: method(self, *args))

    def ask(self, method: Callable[..., Any], *args: Any) -> Answer:
        """Call a method or a function of `PolicyTrainer` with this rank's trainer."""
        return self._answer(lambda: method(self.trainer, *args))

    def _answer(self, function: Callable[[], Any]) -> Answer:
        try:
            answer = Answer(result=function())
        except Exception as error:
            logging.getLogger(__name__).debug("rank %d failed", self.rank, exc_info=True)
            answer = Answer(error=_that_travels(error), traceback=traceback.format_exc())
        answer.records = self._records.take()
        return answer

    def process_id(self) -> int:
        return os.getpid()

    def open_store(self, address: str) -> int:
        """Open the store at which the ranks meet, on this address of rank 0's host; return its port."""
        from onpolicy.training import distributed

        self._store, port = distributed.open_store(address)
        return port

    def join(self, address: str, port: int, world_size: int) -> None:
        """Form the group of all ranks."""
        from onpolicy.training import distributed

        distributed.join(address, port, rank=self.rank, world_size=world_size)

    def make(self, config: TrainConfig, contract: NumericsContract, gpu: int | None) -> int:
        """Make the trainer, on that GPU of the host, if any; return this rank's data-parallel index."""
        import torch

        from onpolicy.training import distributed, make_trainer

        if gpu is not None:
            torch.cuda.set_device(gpu)
        self.trainer = make_trainer(config, contract, self.num_threads)
        return distributed.data_rank()

    def leave(self) -> None:
        """Close the trainer, if there is one, and end this process, which then removes its files."""
        import ray

        try:
            if hasattr(self, "trainer"):
                self.trainer.close()
        finally:
            ray.actor.exit_actor()


class _RecordList(logging.Handler):
    """A handler that keeps log records in a form that can be sent to another process."""

    def __init__(self, level: int):
        super().__init__(level)
        self._kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        self._kept.append(
            logging.makeLogRecord(
                {**record.__dict__, "msg": text, "args": None, "exc_info": None, "exc_text": None}
            )
        )

    def take(self) -> list[logging.LogRecord]:
        kept, self._kept = self._kept, []
        return kept


def _write_into(file: Path) -> None:
    """Redirect all output of this process to a file, native libraries' included."""
    file.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _that_travels(error: Exception) -> Exception:
    """Return the error, or an OnPolicyError with its message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return OnPolicyError(f"{type(error).__name__}: {error}")
    return error
