"""The command `onpolicy export`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onpolicy.cli.command import with_commits
from onpolicy.cli.parse import parse
from onpolicy.config.flags import spelled
from onpolicy.errors import ConfigError
from onpolicy.outputs.destinations import require_directory


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a checkpoint with an adapter merged into it, for programs that load no adapters.

    In bfloat16 much of an update may be rounded away. The command prints how much."""

    hf_checkpoint: str = ""
    """Local directory with the Hugging Face checkpoint of the base model. Required."""

    merge: str = ""
    """Directory of a PEFT adapter to merge, such as step_N/hf of a run with --lora-rank. Required."""

    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """Dtype of the merged checkpoint. Required."""

    output: str = ""
    """New directory to write. Required."""


def main(argv: Sequence[str]) -> int:
    """Read the checkpoint, and write the merged one."""
    config = parse(ExportConfig, argv, "onpolicy export")
    for flag in ("hf_checkpoint", "merge", "dtype", "output"):
        if not getattr(config, flag):
            raise ConfigError(f"{spelled(flag)} is missing. Give it.")
    if Path(config.output).exists():
        raise ConfigError(f"--output={config.output}: is there already. Give another directory.")
    require_directory("--output", str(Path(config.output).absolute().parent))

    from onpolicy.models.lora.merged import export_merged

    config = with_commits(config)
    given = Path(config.hf_checkpoint), config.merge, Path(config.output), config.dtype
    print(f"{config.output}: {export_merged(*given)}, in {config.dtype}")
    return 0
