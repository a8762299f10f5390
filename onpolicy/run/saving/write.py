"""The writing of a checkpoint, complete or not at all.

`require_room` checks that a checkpoint fits on the disk, before the first step.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from transformers import PretrainedConfig

from onpolicy.config.sft_flags import AnyRun
from onpolicy.contract import AdapterShape
from onpolicy.errors import (
    CheckpointError,
    ConfigError,
    HostLostError,
    TrainerLostError,
    in_one_line,
)
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import adapter_size
from onpolicy.models.text_part import has_text_part
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.outputs.lock import locked
from onpolicy.run.saving.checkpoint import (
    STATE,
    Best,
    RunState,
    checkpoints,
    made_with,
    make_record,
    name_of,
)
from onpolicy.system import files
from onpolicy.system.free_memory import gib
from onpolicy.training import Trainer

logger = logging.getLogger(__name__)

MASTER = 3 * 4
"""The bytes of training state for a parameter: its float32 weight and two moments of AdamW."""

_PARTIAL = ".partial_"
"""The prefix of directories that are being written or deleted."""

_PROBE_BYTES = 4 << 20
"""The number of bytes written to see whether a disk is full: more than a refused write leaves free."""


def save(
    config: AnyRun,
    engines: HasTrainer,
    state: RunState,
    write_rollouts: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Write a checkpoint, then delete those too old to keep. `write_rollouts` writes the samples that
    were not trained on yet. Raises CheckpointError, and leaves earlier checkpoints as they are. After
    the loss of a rank or a host its own error is raised instead, since a run may continue without it."""
    root = Path(config.output.save)
    final = root / name_of(state.rollouts_done)
    partial = root / f"{_PARTIAL}{final.name}"
    try:
        with locked(root, "--save"):  # locks again, in case the directory was removed meanwhile
            _begin(partial)
            with engines.room():
                engines.trainer.save(partial)
                engines.trainer.export(partial / "hf")
            write_rollouts(partial)
            _commit(config, state, partial, final)
    except (OSError, RuntimeError) as error:
        cause = _cause(partial, error)
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (TrainerLostError, HostLostError, ConfigError)):
            raise
        raise _not_written(root, final.name, cause) from error
    _delete_old(root, config.output.keep_checkpoints, state.best)


class HasTrainer(Protocol):
    """An owner of the trainer, such as a run's engines."""

    trainer: Trainer

    def room(self) -> AbstractContextManager[None]:
        """Let the trainer use the memory that it shares with others, within the context."""


def _cause(partial: Path, error: Exception) -> str:
    """Return an error's message, preceded by the reason if nothing more can be written: PyTorch's writer
    reports a full disk as a position in a file."""
    if isinstance(error, OSError) and error.errno is not None:
        return str(error)
    try:
        with (partial / "probe").open("wb", buffering=0) as probe:
            probe.write(bytes(_PROBE_BYTES - 1))
            probe.write(b"0")  # the first may have written a part
    except OSError as refused:
        if str(refused.strerror) not in str(error):
            return f"{refused.strerror}; {in_one_line(error)}"
    return str(error)


def _not_written(root: Path, name: str, cause: str) -> CheckpointError:
    whole = [path.name for path in checkpoints(root).values()]
    latest = f"The latest complete one is {whole[-1]}" if whole else "There is no earlier one"
    return CheckpointError(
        f"--save={root}: {name} could not be written ({cause}; {gib(free_bytes(root))} GiB are free "
        f"there). {latest}. Free some space, and start again with --load."
    )


def _begin(partial: Path) -> None:
    """Make the directory to write into, and remove leftovers of killed runs."""
    for leftover in partial.parent.glob(f"{_PARTIAL}step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)


def _commit(config: AnyRun, state: RunState, partial: Path, final: Path) -> None:
    """Sync everything to disk, then give the directory its name."""
    record = make_record(partial, state, config=config.to_dict(), made_with=made_with(config))
    (partial / STATE).write_text(record)
    for path in [*partial.rglob("*"), partial]:
        files.sync(path)
    _set_aside(final)
    partial.rename(final)
    files.sync(final.parent)
    logger.info("saved %s", final)


def _set_aside(damaged: Path) -> None:
    """Rename a damaged checkpoint of the new one's name; `resume` refuses to overwrite complete ones."""
    if damaged.exists():
        number = 1
        while (kept := damaged.with_name(f"{damaged.name}.damaged{number}")).exists():
            number += 1
        damaged.rename(kept)
        logger.warning("%s was damaged; it is %s now", damaged, kept)


def _delete_old(root: Path, keep: int, best: Best | None) -> None:
    """Delete the oldest checkpoints but the best; rename first, so that a kill leaves no half one."""
    for number, old in list(checkpoints(root).items())[:-keep] if keep else []:
        if best is not None and number == best.rollouts_done:
            continue
        try:
            doomed = old.rename(old.with_name(f"{_PARTIAL}{old.name}"))
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("%s could not be deleted (%s)", old, error)


def require_room(
    config: AnyRun, hf_config: PretrainedConfig, adapter: AdapterShape | None = None
) -> None:
    """Raise ConfigError, with the sum, if a checkpoint (of adapters alone, if any) does not fit."""
    trust = config.model.trust_remote_code
    parameters = _saved_parameters(hf_config, trust, adapter)
    source = config.model.hf_checkpoint
    copies = has_text_part(source) and adapter is None
    others = CheckpointReader(source).num_others if copies else 0
    if config.model.images and copies:  # then they are trained
        parameters, others = parameters + others, 0
    if critic := config.critic_checkpoint:
        parameters += _saved_parameters(load_config(critic, trust, "--critic-load"), trust)
    computed = getattr(torch, config.model.dtype).itemsize
    # Megatron saves the weights in compute dtype, too.
    trained = MASTER + computed * (config.trainer.train_backend == "megatron")
    needed = parameters * (trained + computed) + others * computed
    free = free_bytes(Path(config.output.save))
    if needed > free:
        raise ConfigError(
            f"--save={config.output.save}: a checkpoint takes {parameters:,} parameters"
            f"{_whose(adapter is not None, bool(critic))} x ({trained} bytes of training state + "
            f"{computed} of exported weights){_beside(others, computed)} = {gib(needed)} GiB, and "
            f"{gib(free)} GiB are free there. Make room, or choose another directory."
        )


def _saved_parameters(
    hf_config: PretrainedConfig, trust_remote_code: bool, adapter: AdapterShape | None = None
) -> int:
    """Return the number of a model's parameters that a checkpoint holds."""
    model = empty_causal_lm(hf_config, trust_remote_code)
    return adapter_size(model, adapter) if adapter else sum(x.numel() for x in model.parameters())


def _whose(has_adapter: bool, has_critic: bool) -> str:
    """Return the owners of the parameters, in words; "" if they are all of one model."""
    policy = "adapters" if has_adapter else "policy" * has_critic
    return f" of {policy}{' and critic' * has_critic}" if policy else ""


def _beside(others: int, computed: int) -> str:
    """Return what an export copies beside a text part, in words; "" if nothing."""
    return f" + {others:,} parameters of other parts x {computed}" if others else ""


def free_bytes(directory: Path) -> int:
    """Return the bytes that an ordinary user may still write at a directory, present or planned."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(there).free
