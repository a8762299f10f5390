"""`onpolicy export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onpolicy.cli.parse import parse
from onpolicy.config.flags import spelled
from onpolicy.errors import ConfigError
from onpolicy.outputs.destinations import require_directory


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a checkpoint whose weights were rounded, or that an adapter was merged into.

    --quantised takes the `hf` directory of a checkpoint, which holds the weights before they are rounded
    as a run with this --rollout-weight-format rolls out, and writes numbers and scales in the form of
    compressed-tensors. --hf-checkpoint of other commands takes that, and transformers loads it, but for
    mixtures of experts.

    --merge takes the base, and writes it with an adapter added to its weights, for what loads no
    adapters. In bfloat16 much of an update may be rounded away; how much is said.
    """

    hf_checkpoint: str = ""
    """Local directory with the Hugging Face checkpoint. Required."""

    quantised: Literal[
        "", "fp8_e4m3", "fp8_e4m3_block128", "int8", "int4", "int4_group128", "int3",
        "int3_group128", "mxfp4", "nvfp4",
    ] = ""  # fmt: skip
    """The format."""

    activations: Literal["", "fp8_e4m3"] = ""
    """Have whoever loads the checkpoint round what linears read, too, as a run with this
    --rollout-activation-format does. With --quantised fp8_e4m3."""

    merge: str = ""
    """Directory of an adapter in PEFT's format, such as step_N/hf of a run with --lora-rank, which is
    merged into --hf-checkpoint."""

    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """That of a merged checkpoint. Required with --merge."""

    output: str = ""
    """Directory to write, which is not there yet. Required."""


def main(argv: Sequence[str]) -> int:
    """Read the checkpoint and write the other."""
    config = parse(ExportConfig, argv, "onpolicy export")
    for flag in ("hf_checkpoint", "output", *(["dtype"] if config.merge else [])):
        if not getattr(config, flag):
            raise ConfigError(f"{spelled(flag)} is missing. Give it.")
    if bool(config.quantised) == bool(config.merge):
        raise ConfigError("--quantised, --merge: one of the two says what is written. Give one.")
    if config.dtype and not config.merge:
        raise ConfigError(f"--dtype={config.dtype}: only --merge reads it. Leave it out.")
    if config.activations not in ("", config.quantised):
        raise ConfigError(
            f"--activations={config.activations}: products are of numbers of one format. Give "
            f"--quantised {config.activations}, or leave it out."
        )
    if Path(config.output).exists():
        raise ConfigError(f"--output={config.output}: is there already. Give another directory.")
    require_directory("--output", str(Path(config.output).absolute().parent))

    if config.merge:
        from onpolicy.models.lora.merged import export_merged

        given = Path(config.hf_checkpoint), config.merge, Path(config.output), config.dtype
        print(f"{config.output}: {export_merged(*given)}, in {config.dtype}")
        return 0

    from onpolicy.models.quantised import export_quantised, holds_experts

    source, output = Path(config.hf_checkpoint), Path(config.output)
    count = export_quantised(source, output, config.quantised, bool(config.activations))
    inputs = ", as what they are multiplied with" if config.activations else ""
    unread = ". transformers cannot load experts in this form" if holds_experts(output) else ""
    print(f"{config.output}: {count} weights in {config.quantised}{inputs}{unread}")
    return 0
