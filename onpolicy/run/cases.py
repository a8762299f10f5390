"""A mismatch of a run as a file: what is needed to look at it again."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onpolicy.config.tools import ExplainConfig
from onpolicy.errors import ConfigError
from onpolicy.run.engines import EnginePair
from onpolicy.system import files
from onpolicy.types import Request, Sample, SamplingParams

logger = logging.getLogger(__name__)

Case = dict[str, Any]

KEYS = {
    "prompt_ids", "response_ids", "rollout_log_probs", "train_log_probs", "sampling_seed", "params",
    "step", "weight_version", "weight_digest", "contract",
}  # fmt: skip


def make_case(
    request: Request,
    sample: Sample,
    train_log_probs: Sequence[float],
    step: int,
    engines: EnginePair,
) -> Case:
    """A sample of rollout `step` whose log-probabilities differ, and what both engines were then."""
    return {
        "step": step,
        "sample": sample.name,
        "prompt_ids": request.prompt_ids,
        "response_ids": sample.response_ids,
        "rollout_log_probs": sample.rollout_log_probs,
        "train_log_probs": list(train_log_probs),
        "sampling_seed": request.sampling_seed,
        "params": asdict(request.params),
        "weight_version": sample.weight_version,
        "weight_digest": engines.weight_digest,
        "contract": json.loads(engines.contract.to_json()),
    }


def write_case(case: Case, file: Path) -> None:
    """Write the file, whole or not at all."""
    file.parent.mkdir(exist_ok=True)
    files.write(file, json.dumps(case) + "\n")


def read_case(file: Path) -> Case:
    """Raises ConfigError for a file that is none."""
    try:
        case: Case = json.loads(file.read_bytes())
        missing = KEYS - case.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--case={file}: cannot be read as a case ({error}). Give a file that a run wrote into "
            "RUN_DIR/cases."
        ) from error
    if missing:
        raise ConfigError(
            f"--case={file}: holds no {', '.join(sorted(missing))}, so it is no case. Give a file that "
            "a run of this version wrote into RUN_DIR/cases."
        )
    return case


def case_request(file: Path) -> Request:
    """What the response of a case was sampled by."""
    case = read_case(file)
    params = {**case["params"], "stop_token_ids": tuple(case["params"]["stop_token_ids"])}
    return Request(
        prompt_ids=case["prompt_ids"],
        sampling_seed=case["sampling_seed"],
        params=SamplingParams(**params),
    )


def compare_weights(case: Case, digest: str, config: ExplainConfig) -> None:
    """Say so if the engines do not hold the weights that the case was sampled with."""
    if digest != case["weight_digest"]:
        logger.warning(
            "%s: was sampled with other weights (%s, version %s) than those of %s (%s), so its "
            "mismatch may not come again. Give the checkpoint of rollout %d, with --load or "
            "--hf-checkpoint.",
            config.case, case["weight_digest"], case["weight_version"], config.model.hf_checkpoint,
            digest, case["step"],
        )  # fmt: skip
