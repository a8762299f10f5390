"""The choice of the checkpoint to resume from, and the checks that the run may resume it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from onpolicy.config import settings
from onpolicy.config.groups import OutputConfig
from onpolicy.config.sft_flags import AnyRun
from onpolicy.errors import CheckpointError, ConfigError
from onpolicy.outputs.directory import versions
from onpolicy.run.engines import EnginePair
from onpolicy.run.saving.checkpoint import (
    STATE,
    Checkpoint,
    checkpoints,
    digest_prompts,
    made_with,
    names_code,
    number_of,
    read,
)
from onpolicy.types import Prompt

logger = logging.getLogger(__name__)


def find(
    config: AnyRun, prompts: Sequence[Prompt], evaluations: Mapping[str, str]
) -> Checkpoint | None:
    """Return the checkpoint that --load names, every byte checked; None for a run from scratch.
    evaluations: `digest_sets` of the evaluation sets. Raises ConfigError if there is no checkpoint,
    if it is damaged, if settings differ that may not change, if prompts or evaluation sets differ,
    or if the run would write among another run's checkpoints."""
    output = config.output
    directory = _asked_for(output)
    found = None if directory is None else _read_whole(directory)
    if found is not None:
        _require_experts_laid_out_alike(found, config)
        _require_same_settings(found, config)
        _require_same_prompts(found, config, prompts)
        _require_same_evaluations(found, config, evaluations)
        _report_other_surroundings(found, config)
    if output.save:
        _require_own(Path(output.save), found)
    return found


def take_over(found: Checkpoint, config: AnyRun, engines: EnginePair) -> None:
    """Load a checkpoint into the trainer, and let the first push check the weights' digest. The
    digest matters for a model with adapters, whose base weights are not in the checkpoint."""
    engines.trainer.load(found.directory)
    # With other versions or settings, names or digests may differ.
    is_alike = versions().items() <= found.made_with.items()
    if is_alike and not settings.changes(found.config, config):
        engines.expected_digest = found.state.weights or ""
    logger.info("resumed from %s", found.directory)


def _asked_for(output: OutputConfig) -> Path | None:
    if not output.load:
        return None
    directory = Path(output.load)
    if (directory / STATE).exists() or (directory.is_dir() and number_of(directory) is not None):
        return directory
    if existing := checkpoints(directory):
        return existing[max(existing)]
    if output.save and directory.resolve() == Path(output.save).resolve():
        logger.info("--load=%s: no checkpoint there yet, so the run starts from scratch", directory)
        return None
    rule = "holds no checkpoint" if directory.is_dir() else "no such directory"
    raise ConfigError(
        f"--load={directory}: {rule}. Give a directory of checkpoints, or one of them. (Only where "
        "--save is the same directory may it be empty: then the run starts from scratch.)"
    )


def _read_whole(directory: Path) -> Checkpoint:
    logger.info("checking every byte of %s", directory)
    try:
        return read(directory)
    except CheckpointError as error:
        number = number_of(directory) or 0
        older = [path for n, path in checkpoints(directory.parent).items() if n < number]
        whole = next(filter(_is_whole, reversed(older)), None)
        remedy = (
            f"The newest whole one before it is {whole}: resume from that with --load {whole}."
            if whole
            else "There is no whole one before it: start the run again, with another --save."
        )
        raise ConfigError(f"--load={directory}: {error}. {remedy}") from error


def _is_whole(directory: Path) -> bool:
    try:
        read(directory)
    except CheckpointError:
        return False
    return True


def _require_experts_laid_out_alike(found: Checkpoint, config: AnyRun) -> None:
    """Raise ConfigError if experts were shared by ranks and are no longer, or the reverse: Megatron then
    uses another optimizer, and the checkpoint another layout."""
    before, now = found.config.get("megatron_ep", 1), config.megatron.megatron_ep
    if (before > 1) != (now > 1):
        raise ConfigError(
            f"--megatron-ep={now}: {found.directory} was made with --megatron-ep {before}, and what "
            "Megatron's optimizer keeps is laid out otherwise where ranks share experts than where they "
            f"do not. Give --megatron-ep {before}."
        )


def _require_same_settings(found: Checkpoint, config: AnyRun) -> None:
    changes = settings.changes(found.config, config)
    allowed = config.output.allow_changed_settings
    if refused := [change for change in changes if change.name not in allowed]:
        lines = "\n".join(f"  {change}" for change in refused)
        names = " ".join(change.name for change in refused)
        raise ConfigError(
            f"--load={found.directory}: was made under other settings, and a resumed run is the same "
            f"run:\n{lines}\nGive it the same, or add --allow-changed-settings {names}"
        )
    for change in changes:
        logger.warning("%s goes on under a changed setting: %s", found.directory, change)
    for name in sorted(found.config.keys() - config.to_dict().keys()):
        logger.warning("%s was made with a setting that is gone: %s", found.directory, name)


def _require_same_prompts(found: Checkpoint, config: AnyRun, prompts: Sequence[Prompt]) -> None:
    if found.state.prompts == digest_prompts(prompts):
        return
    if "prompt_data" in config.output.allow_changed_settings:
        logger.warning("%s goes on with other prompts", found.directory)
    else:
        raise ConfigError(
            f"--prompt-data={config.data.sources}: its prompts are others than when "
            f"{found.directory} was made, which says how far a run has come in them. Give the same, or "
            "add --allow-changed-settings prompt_data"
        )


def _require_same_evaluations(
    found: Checkpoint, config: AnyRun, evaluations: Mapping[str, str]
) -> None:
    before = found.state.evaluations
    names = sorted({*before, *evaluations})
    others = [name for name in names if before.get(name) != evaluations.get(name)]
    if not others:
        return
    shown = ", ".join(name or "the one without a name" for name in others)
    if "eval_prompt_data" in config.output.allow_changed_settings:
        logger.warning("%s goes on with other evaluation sets: %s", found.directory, shown)
        return
    raise ConfigError(
        f"--eval-prompt-data, --eval-config: other evaluation sets than when {found.directory} was made "
        f"({shown}): there are more or fewer, their prompts are others, or they are sampled or scored "
        "otherwise, so that one curve would show two measures. Give the same, or add "
        "--allow-changed-settings eval_prompt_data"
    )


def _report_other_surroundings(found: Checkpoint, config: AnyRun) -> None:
    """Warn of other versions, ranks or user's functions: no settings, but they may change bits."""
    for name, now in made_with(config).items():
        if now != (before := found.made_with.get(name, now if names_code(name) else None)):
            logger.warning("%s was made with %s=%s, now %s", found.directory, name, before, now)


def _require_own(save: Path, found: Checkpoint | None) -> None:
    """Raise ConfigError for checkpoints under --save of another run, or later than `found`."""
    there = checkpoints(save)
    if there and (found is None or found.directory.parent.resolve() != save.resolve()):
        raise ConfigError(
            f"--save={save}: holds checkpoints of another run (up to {there[max(there)].name}), which "
            f"this one would replace. Resume it with --load {save}, or choose another directory."
        )
    for number, other in there.items():
        if found is None or number <= found.state.rollouts_done:
            continue
        if _is_whole(other):
            raise ConfigError(
                f"--save={save}: holds {other.name}, which is later than --load={found.directory} and "
                f"would be replaced. Resume with --load {save}, move it away, or choose another "
                "directory."
            )
        logger.warning("%s is damaged; it is set aside when the run comes to it", other)
