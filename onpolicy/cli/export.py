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
    """Write a checkpoint with rounded weights, as a run with this --rollout-weight-format rolls out.

    Takes the `hf` directory of a checkpoint, which holds the weights before they are rounded, and writes
    numbers and scales in the form of compressed-tensors, which transformers loads. Dense models.
    """

    hf_checkpoint: str = ""
    """Local directory with the Hugging Face checkpoint. Required."""

    quantised: Literal[
        "", "fp8_e4m3", "int8", "int4", "int4_group128", "int3", "int3_group128"
    ] = ""  # fmt: skip
    """The format. Required."""

    output: str = ""
    """Directory to write, which is not there yet. Required."""


def main(argv: Sequence[str]) -> int:
    """Read the checkpoint and write the other."""
    config = parse(ExportConfig, argv, "onpolicy export")
    for flag in ("hf_checkpoint", "quantised", "output"):
        if not getattr(config, flag):
            raise ConfigError(f"{spelled(flag)} is missing. Give it.")
    if Path(config.output).exists():
        raise ConfigError(f"--output={config.output}: is there already. Give another directory.")
    require_directory("--output", str(Path(config.output).absolute().parent))

    from onpolicy.models.quantised import export_quantised

    count = export_quantised(Path(config.hf_checkpoint), Path(config.output), config.quantised)
    print(f"{config.output}: {count} weights in {config.quantised}")
    return 0
