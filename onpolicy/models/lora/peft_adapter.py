"""The metadata of an adapter in PEFT's format, as flags: rank, scale and targets.

Source: `LoraConfig` and `get_peft_model_state_dict` of the package peft (0.21).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt
from safetensors import SafetensorError, safe_open

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.models.text_part import own_name
from onpolicy.system.files import read_json_object, require_file
from onpolicy.system.records import Shape

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

NESTED = ".base_layer"
"""End of the name of a module that PEFT wrapped twice: experts whose gate_up_proj is adapted inside
the wrapper of their down_proj."""

_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")

_OTHERWISE_NAMED = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.\w+)?\.weight")
"""A factor named as in a wrapped model, or without the prefix that PEFT puts before all names."""

_MAGNITUDE = re.compile(r".+\.lora_magnitude_vector(?:\.\w+)*")

_DORA = (
    "DoRA, which also trains the lengths of rows, and an adapter here is two factors. Train it without "
    "use_dora, or merge it into its base by PEFT (merge_and_unload) and give the result as "
    "--hf-checkpoint."
)

_READ = {"r", "lora_alpha", "use_rslora", "base_model_name_or_path"}

_OF_NO_RESULT = {
    "task_type", "revision", "inference_mode", "peft_version", "auto_mapping", "target_modules",
    "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout",
    "megatron_core", "qalora_group_size", "eva_config", "runtime_config",
}  # fmt: skip
"""Fields that do not change what the stored factors compute (dropout in training), or that the
tensor names already say (the targets)."""

_EMPTY: tuple[Any, ...] = (None, False, [], {}, 0, "")

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # PiSSA, OLoRA, CorDA and LoftQ change the base.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Accepted values of other fields. A field that is not listed must be empty, so that an option that
PEFT adds is refused until it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    peft_type: str
    r: Annotated[int, Ge(1)]
    lora_alpha: Annotated[float, Gt(0)]
    use_rslora: bool = False
    base_model_name_or_path: str | None = None


_SHAPE = Shape(_Told, is_open=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """The adapter of a directory, without its weights."""

    directory: Path
    rank: int
    alpha: float
    is_rslora: bool

    base: str
    """Name or path of the base model; "" if the file names none."""

    factors: dict[str, tuple[int, ...]]
    """Shape of each tensor, by its name in the file."""

    @property
    def targets(self) -> str:
        """Return its targets as in --lora-target-modules: the last parts of its modules' names."""
        modules = (linear_of(name)[0].removesuffix(NESTED) for name in self.factors)
        return ",".join(sorted({module.rpartition(".")[2] for module in modules}))

    @property
    def flags(self) -> dict[str, Any]:
        """Return the flags of a run that trains it."""
        return {
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            "lora_rslora": self.is_rslora,
            "lora_target_modules": self.targets,
        }


def read_peft_adapter(directory: str, flag: str) -> PeftAdapter:
    """Read an adapter's metadata.

    Raise ConfigError, which names `flag`, if it is incomplete or computes something other than x
    W^T + s (x A^T) B^T.
    """
    path, name = Path(directory), f"{flag}={directory}"
    record = read_json_object(path / CONFIG, f"{name}: {CONFIG}")
    try:
        told = _SHAPE.take(record)
    except ValueError as error:
        raise ConfigError(f"{name}: {CONFIG}: {error}. Give an adapter that PEFT wrote.") from error
    if record.get("use_dora"):
        raise ConfigError(f"{name}: {CONFIG}: use_dora={record['use_dora']!r} is {_DORA}")
    for field, value in record.items():
        if value not in _PLAIN.get(field, _EMPTY) and field not in _READ | _OF_NO_RESULT:
            raise ConfigError(
                f"{name}: {CONFIG}: {field}={value!r} is not supported: an adapter here is two factors "
                "beside a linear, of one rank and scale everywhere, and the base stays as it is. Train "
                "one without it."
            )
    if dropout := record.get("lora_dropout"):
        logger.info("%s: lora_dropout=%s is not applied: rollouts have none", name, dropout)
    return PeftAdapter(
        directory=path,
        rank=told.r,
        alpha=told.lora_alpha,
        is_rslora=told.use_rslora,
        base=told.base_model_name_or_path or "",
        factors=_factors(path / WEIGHTS, f"{name}: {WEIGHTS}"),
    )


def _factors(file: Path, name: str) -> dict[str, tuple[int, ...]]:
    require_file(file, name)
    try:
        with safe_open(file, framework="np") as stored:
            shapes = {key: tuple(stored.get_slice(key).get_shape()) for key in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{name} is no complete safetensors file ({in_one_line(error)}). Get it again."
        ) from error
    for key in shapes:
        if not _FACTOR.fullmatch(key):
            if _MAGNITUDE.fullmatch(key):
                raise ConfigError(f"{name}: holds {key}, a magnitude of {_DORA}")
            if other := _OTHERWISE_NAMED.fullmatch(key):
                raise ConfigError(
                    f"{name}: holds {key}, and in a file of PEFT's that factor is "
                    f"base_model.model.{other[1]}.lora_{other[2]}.weight. Rename all of them so, or "
                    "write the file with PEFT's save_pretrained."
                )
            raise ConfigError(
                f"{name}: holds {key}, which is no factor of a linear. Train an adapter of linears "
                "alone; if PEFT added the base's output projection, save_pretrained(..., "
                "save_embedding_layers=False) leaves it out."
            )
    if not shapes:
        raise ConfigError(f"{name}: holds no adapter. Get it again.")
    return shapes


def linear_of(name: str) -> tuple[str, str]:
    """Map a tensor's name in the file to the name of its linear, and "A" or "B".

    An adapter of a model that also sees images names those of its text part within the whole.
    """
    found = _FACTOR.fullmatch(name)
    assert found is not None
    return own_name(found[1]) or found[1], found[2]
