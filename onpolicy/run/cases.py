"""A mismatch of a run as a file, with everything needed to reproduce it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress, count
from pathlib import Path
from typing import Annotated, get_args

import torch
from pydantic import AfterValidator

from onpolicy.config.groups.engine_flags import ActivationFormat, WeightFormat
from onpolicy.config.groups.input_flags import Dtype
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.parity import mismatches
from onpolicy.rollout.seeds import seed_of_branch
from onpolicy.run.engines import EnginePair
from onpolicy.system import files
from onpolicy.system.records import Count, Shape
from onpolicy.trajectory import Trajectory
from onpolicy.types import Request, Sample, SamplingParams

logger = logging.getLogger(__name__)


def _known(contract: NumericsContract) -> NumericsContract:
    """Return a contract whose formats are choices of flags. Raises ValueError for another one."""
    choices = {
        "dtype": get_args(Dtype),
        "weight_format": get_args(WeightFormat),
        "activation_format": get_args(ActivationFormat),
    }
    for name, known in choices.items():
        if (value := getattr(contract, name)) not in known:
            raise ValueError(f"{name}={value!r}: must be one of {known}")
    return contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sample whose log-probabilities differ."""

    step: Count
    sample: str
    trajectory: Trajectory

    train_log_probs: list[float]
    """The trainer's log-probabilities of the sampled tokens."""

    prompt_len: Count
    """The number of tokens before the answer that holds the first differing token."""

    sampling_seed: int

    params: SamplingParams
    """The sampling parameters of that answer, with its length as the limit."""

    weight_digest: str
    contract: Annotated[NumericsContract, AfterValidator(_known)]

    @property
    def request(self) -> Request:
        """Return the request that sampled that answer."""
        return Request(
            prompt_ids=self.trajectory.token_ids[: self.prompt_len],
            images=self.trajectory.until(self.prompt_len).images,
            sampling_seed=self.sampling_seed,
            params=self.params,
            num_begun=self.trajectory.until(self.prompt_len).num_begun(self.params.grammar),
        )


_SHAPE = Shape(Case)


def make_case(
    request: Request,
    sample: Sample,
    train_log_probs: Sequence[float],
    step: int,
    engines: EnginePair,
) -> Case:
    """Return the case of a sample of rollout `step` whose log-probabilities differ. It records the
    weights and the contract of both engines. `request` is the first request of the sample's episode."""
    place = first_apart(sample.trajectory, train_log_probs)
    asked = asked_at(request, sample.trajectory, place)
    if sample.seeds:  # an episode that was restarted has another seed than its request
        seeds = [seed for seed, tokens in sample.seeds for _ in range(tokens)]
        asked = replace(asked, sampling_seed=seeds[sum(sample.trajectory.sampled[:place])])
    return Case(
        step=step,
        sample=sample.name,
        trajectory=sample.trajectory,
        train_log_probs=[*train_log_probs],
        prompt_len=len(asked.prompt_ids),
        sampling_seed=asked.sampling_seed,
        params=asked.params,
        weight_digest=engines.weight_digest,
        contract=engines.contract,
    )


def first_apart(trajectory: Trajectory, train_log_probs: Sequence[float]) -> int:
    """Return the index of the first sampled token that differs in training, or is not finite."""
    places = list(compress(count(), trajectory.sampled))
    rollout, train = map(torch.tensor, (trajectory.rollout_log_probs.array, [*train_log_probs]))
    return places[int(mismatches(train, rollout).nonzero()[0])]


def asked_at(request: Request, trajectory: Trajectory, place: int) -> Request:
    """Return the request that samples the answer around the token at `place` of a trajectory again,
    up to the answer's end. `request` is the first request of the episode. Adjacent answers with
    equal sampling parameters count as one answer."""
    branch, start, end = next(s for s in trajectory.stretches if s[1] <= place < s[2])
    numbers = [*accumulate(trajectory.sampled, initial=0)]

    def way(at: int) -> tuple[float, object] | None:
        if not (start <= at < end and trajectory.sampled[at]):
            return None
        return trajectory.temperatures[numbers[at]], trajectory.grammar_at(at)

    sampled = way(place)
    assert sampled is not None
    temperature, span = sampled[0], trajectory.grammar_at(place)
    # Widen from this token to all adjacent tokens that were sampled in the same way.
    first = next(at for at in count(place, -1) if way(at - 1) != sampled)
    last = next(at for at in count(place) if way(at + 1) != sampled)
    return Request(
        prompt_ids=trajectory.token_ids[:first],
        images=trajectory.until(first).images,
        sampling_seed=seed_of_branch(request.sampling_seed, branch),
        params=replace(
            request.params,
            temperature=temperature,
            max_new_tokens=last + 1 - first,
            grammar=span.grammar if span else None,
        ),
        num_begun=first - span.start if span else 0,
    )


def write_case(case: Case, file: Path) -> None:
    """Write the file atomically."""
    file.parent.mkdir(exist_ok=True)
    files.write(file, _SHAPE.write(case) + "\n")
    logger.info("the first sample with a mismatch is in %s", file)


def read_case(file: Path) -> Case:
    """Read a case. Raises ConfigError for a file that is none."""
    try:
        return _SHAPE.read(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--case={file}: cannot be read as a case ({error}). Give a file that a run of this version "
            "wrote into RUN_DIR/cases."
        ) from error
