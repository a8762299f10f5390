"""A mismatch of a run as a file: what is needed to look at it again."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Gt
from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from onpolicy.config.groups.engines import WeightFormat
from onpolicy.errors import ConfigError
from onpolicy.outputs.trajectories import Count, TrajectoryRecord, read, write
from onpolicy.run.engines import EnginePair
from onpolicy.system import files
from onpolicy.system.records import CLOSED, OPEN, checked
from onpolicy.types import Request, Sample

logger = logging.getLogger(__name__)


@with_config(CLOSED)
class _Grammar(TypedDict):
    """`Grammar`."""

    kind: Literal["regex", "json_schema"]
    text: str
    stop_token_ids: list[Count]


@with_config(CLOSED)
class _Params(TypedDict):
    """`SamplingParams`."""

    temperature: Annotated[float, Gt(0)]
    max_new_tokens: Count
    stop_token_ids: list[Count]
    top_p: float
    top_k: int
    min_p: float
    ignore_eos: bool
    stop: NotRequired[list[str]]
    return_routed_experts: bool
    grammar: NotRequired[_Grammar | None]


@with_config(OPEN)
class _Contract(TypedDict):
    """What is read of a `NumericsContract`, whose other fields it holds too."""

    backend: str
    dtype: Literal["bfloat16", "float32"]
    row_parallel_blocks: Count
    kinds: list[str]
    weight_format: NotRequired[WeightFormat]


@with_config(CLOSED)
class Case(TypedDict):
    """A sample whose log-probabilities differ."""

    step: Count
    sample: str
    trajectory: TrajectoryRecord
    train_log_probs: list[float]
    """What the trainer gives the sampled tokens."""
    sampling_seed: int
    params: _Params
    weight_digest: str
    contract: _Contract


_SHAPE = TypeAdapter(Case)


def make_case(
    request: Request,
    sample: Sample,
    train_log_probs: Sequence[float],
    step: int,
    engines: EnginePair,
) -> Case:
    """A sample of rollout `step` whose log-probabilities differ, and what both engines were then."""
    contract: Any = json.loads(engines.contract.to_json())
    params: Any = asdict(request.params)
    return {
        "step": step,
        "sample": sample.name,
        "trajectory": write(sample.trajectory),
        "train_log_probs": list(train_log_probs),
        "sampling_seed": request.sampling_seed,
        "params": params,
        "weight_digest": engines.weight_digest,
        "contract": contract,
    }


def write_case(case: Case, file: Path) -> None:
    """Write the file, whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    files.write(file, json.dumps(case) + "\n")
    logger.info("the first sample with a mismatch is in %s", file)


def read_case(file: Path) -> Case:
    """Raises ConfigError for a file that is none."""
    try:
        case = checked(_SHAPE, json.loads(file.read_bytes()))
        read(case["trajectory"])
        return case
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--case={file}: cannot be read as a case ({error}). Give a file that a run of this version "
            "wrote into RUN_DIR/cases."
        ) from error
