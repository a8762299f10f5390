"""Samples for people to read: a few from every rollout and evaluation, in the run directory.

    samples/rollout_000003.jsonl  samples/eval_000010.jsonl  samples/eval_NAME_000010.jsonl
    samples/failed_rollout_000003.jsonl  ...  samples/images/SHA-256

There is one file per rollout, so that a resumed run replaces the files it repeats. A line is a
sample: its prompt and response as the model read and sampled them, special tokens included; and
where its episode has several turns, trajectories or images, all given and sampled text, in order. An
image is a file of its own, once for a run.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from onpolicy.errors import visible
from onpolicy.images.placed import PlacedImage
from onpolicy.outputs.sample_images import IMAGES, STAND_IN
from onpolicy.system import files
from onpolicy.system.records import Count
from onpolicy.trajectory import Trajectory
from onpolicy.types import ChosenPrompt, Sample, SampleGroup

MOST_OF_A_PROMPT = 4
"""The most episodes of one prompt that are written, so that several prompts are included."""

MOST_CHARACTERS = 600
"""The most characters of a prompt or a response on the console."""

_NAME = re.compile(r"(?:failed_)?(?:rollout|eval|eval_.+)_(\d{6,})\.jsonl")

_ATTEMPT = ("group", "sample", "attempt", "message")
"""The fields that identify a failed attempt within its file and between runs."""

Decode = Callable[[list[int]], str]
"""A function from token ids to text with special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt at an episode that failed."""

    prompt: ChosenPrompt

    group: Count
    """The number of its group: a prompt may be drawn again before the file is written."""

    sample_index: Count

    attempt: Count
    """The number of earlier failures of the same episode."""

    reason: str
    message: str
    said: Sequence[Trajectory]
    """The trajectories of its branches. A resumed run may fail the attempt at another token."""


class SampleLog:
    """A writer of samples in `directory`; on a resume, files from `first_step` on are dropped."""

    def __init__(self, directory: Path, decode: Decode, count: int, first_step: int):
        self._directory, self._decode, self._count = directory, decode, count
        self._said_before: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for file in directory.glob("*.jsonl"):
            found = _NAME.fullmatch(file.name)
            if found and int(found[1]) >= first_step:
                self._remember(file)
                file.unlink()

    def _remember(self, file: Path) -> None:
        """Keep the text of failed attempts: how far they get again depends on the clock."""
        if file.name.startswith("failed_"):
            for record in map(json.loads, file.read_bytes().splitlines()):
                key = (file.name, *map(record.get, _ATTEMPT))
                self._said_before.setdefault(key, []).append(record)

    def write(self, name: str, step: int, groups: Sequence[SampleGroup]) -> None:
        """Write some samples of rollout or evaluation `name`, replacing the file of this step."""
        records = [self._record(step, episode, i) for episode, i in self._chosen(groups)]
        self._write(f"{name}_{step:06d}.jsonl", records)

    def write_failed(self, name: str, step: int, attempts: Sequence[FailedAttempt]) -> None:
        """Write the text of some failed attempts of rollout or evaluation `name`, and their reasons."""
        file = f"failed_{name}_{step:06d}.jsonl"
        of_prompts = groupby(attempts, key=lambda each: each.prompt.index)
        chosen = (each for _, found in of_prompts for each in islice(found, MOST_OF_A_PROMPT))
        records = (record for each in chosen for record in self._of_attempt(file, step, each))
        self._write(file, [*islice(records, self._count)])

    def _of_attempt(self, file: str, step: int, failed: FailedAttempt) -> list[dict[str, Any]]:
        said = failed.said or [Trajectory.begin(failed.prompt.prompt_ids, failed.prompt.images)]
        samples = [
            Sample(
                prompt=failed.prompt, sample_index=failed.sample_index, number=i, trajectory=each
            )
            for i, each in enumerate(said)
        ]
        why = {
            "group": failed.group,
            "attempt": failed.attempt,
            "failed": failed.reason,
            "message": failed.message,
        }
        found = [self._record(step, samples, i) | {"reward": None, **why} for i in range(len(said))]
        return self._said_before.get((file, *(found[0][name] for name in _ATTEMPT)), found)

    def _write(self, name: str, records: Sequence[dict[str, Any]]) -> None:
        if records:
            self._directory.mkdir(exist_ok=True)
            text = "".join(map(_line, records))
            files.write(self._directory / name, text.encode("utf-8", "backslashreplace"))

    def shown(self, groups: Sequence[SampleGroup]) -> list[Sample]:
        """Return the samples that `write` would write."""
        return [episode[number] for episode, number in self._chosen(groups)]

    def _chosen(self, groups: Sequence[SampleGroup]) -> list[tuple[list[Sample], int]]:
        """Return (episode, index of a trajectory in it) for each chosen sample."""
        episodes = (e for group in groups for e in group.episodes[:MOST_OF_A_PROMPT])
        return list(islice(((e, i) for e in episodes for i in range(len(e))), self._count))

    def describe(self, sample: Sample) -> str:
        """Return a few lines for the console on a sample: prompt, response, label and reward."""
        return (
            "the first sample:\n"
            f"  prompt    {_shortened(self._decode(sample.prompt.prompt_ids))}\n"
            f"  response  {_shortened(self._decode(sample.response_ids))}\n"
            f"  label     {_shortened(sample.prompt.label)}\n"
            f"  reward    {'it could not be scored' if sample.has_failed else f'{sample.reward:g}'}"
        )

    def _record(self, step: int, episode: Sequence[Sample], number: int) -> dict[str, Any]:
        sample = episode[number]
        return {
            "step": step,
            "prompt_index": sample.prompt.index,
            "sample": sample.sample_index,
            "trajectory": number,
            "prompt": self._decode(sample.prompt.prompt_ids),
            "response": self._decode(sample.response_ids),
            "label": sample.prompt.label,
            "reward": None if sample.has_failed else sample.reward,
            "reward_parts": sample.reward_parts,
            "finish_reason": str(sample.finish_reason),
            "num_tokens": sample.trajectory.num_sampled,
            "mismatched_tokens": sample.mismatched_tokens,
            **self._of_the_episode(sample, len(episode)),
            "tokens": self._tokens(sample),
        }

    def _tokens(self, sample: Sample) -> dict[str, Any]:
        """Return the R sampled tokens: their texts and values; one value where all are equal."""
        trajectory, learnt = sample.trajectory, sample.learnt
        columns: dict[str, Sequence[float]] = {"log_probs": trajectory.rollout_log_probs}
        if learnt is not None:
            columns |= {"advantages": learnt.advantages, "weights": learnt.weights}
        texts = [self._decode([token]) for token in trajectory.response_ids]
        return {"texts": texts} | {name: _short(values) for name, values in columns.items()}

    def _of_the_episode(self, sample: Sample, num_trajectories: int) -> dict[str, Any]:
        """Return the fields that a plain single-turn answer does not need."""
        trajectory = sample.trajectory
        begins_at = trajectory.forks[-1][1] if trajectory.forks else 0
        is_own = [i >= begins_at for i in range(len(trajectory.token_ids))]
        tokens = zip(trajectory.sampled, is_own, trajectory.token_ids, strict=True)
        turns: list[dict[str, Any]] = []
        end = 0
        for (is_sampled, _), stretch in groupby(tokens, key=lambda token: token[:2]):
            ids = [token for *_, token in stretch]
            start, end = end, end + len(ids)
            text = self._text(trajectory, start, end)
            turn = {"sampled": is_sampled, **text, "num_tokens": len(ids)}
            turns.append(turn | (_times(trajectory, start, end) if is_sampled else {}))
        has_more = len(turns) > 2 or num_trajectories > 1 or trajectory.images
        found = {
            "turns": turns if has_more else None,
            "forks": trajectory.forks or None,
            "is_unscored": sample.has_failed or None,
            "token_rewards": sample.token_rewards,
            "token_weights": sample.token_weights or None,
            "metrics": sample.metrics or None,
            "info": sample.info or None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _text(self, trajectory: Trajectory, start: int, end: int) -> dict[str, Any]:
        """Return the text of a stretch of tokens, and the names of the images' files in it."""
        parts, names, ids = [], [], trajectory.token_ids
        for image in trajectory.images:
            if start <= image.start < end:
                parts.append(self._decode(ids[start : image.start].tolist()))
                names.append(self._keep(image))
                start = image.end
        parts.append(self._decode(ids[start:end].tolist()))
        if not names:
            return {"text": parts[0]}
        text = STAND_IN.join(part.replace(STAND_IN, r"\ufffc") for part in parts)
        return {"text": text, "images": names}

    def _keep(self, image: PlacedImage) -> str:
        """Write an image, unless it is there, and return the name of its file."""
        name = sha256(image.data).hexdigest()
        file = self._directory / IMAGES / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            files.write(file, image.data)
        return name


def _times(trajectory: Trajectory, start: int, end: int) -> dict[str, Any]:
    """Return when the answers that end in this stretch of tokens were asked for and complete."""
    found = [(asked, complete) for at, asked, complete in trajectory.times if start < at <= end]
    return {"seconds": [found[0][0], found[-1][1]]} if found else {}


def _short(values: Sequence[float]) -> float | list[float | None] | None:
    """Round values to four digits; None for a value that is not finite, which JSON cannot hold."""
    short = [float(f"{x:.4g}") if math.isfinite(x) else None for x in values]
    return short[0] if len({*short}) == 1 else short


def _line(record: dict[str, Any]) -> str:
    """Return one line of readable JSON that every reader takes for one line."""
    ends = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
    return json.dumps(record, ensure_ascii=False).translate(ends) + "\n"


def _shortened(text: str) -> str:
    """Return text as one line; of a long text the beginning and the end."""
    text = visible(json.dumps(text, ensure_ascii=False))
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
