"""Teachers that are external SGLang servers, which score samples before these are trained on."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from onpolicy.config import TrainConfig
from onpolicy.config.secrets import reveal
from onpolicy.errors import ConfigError, TrainingError
from onpolicy.rewards import Failure
from onpolicy.rewards.endpoint import Endpoint
from onpolicy.types import Sample

FLAG = "--teacher-url"

_TOKENS_AT_ONCE = 8192
"""The number of vocabulary tokens in one request."""


class Said(NamedTuple):
    """A teacher's scores of R tokens."""

    log_probs: list[float]

    likeliest: list[list[tuple[float, int]]]
    """The (log-probability, token) pairs of the k likeliest tokens at each place, [R, k]; k may be 0."""

    def beside(self, one: Sample) -> Sample:
        """Return the sample with these scores."""
        tops = [[*zip(*row, strict=True)] for row in self.likeliest]
        top = None
        if all(tops):
            top = [[*ids] for _, ids in tops], [[*values] for values, _ in tops]
        return replace(one, teacher_log_probs=self.log_probs, teacher_top=top)


class TeacherServers:
    """A run's teacher servers by name; none without --teacher-url."""

    def __init__(self, config: TrainConfig):
        self.flags = config.distillation
        self.top_k = self.flags.loss_top_k
        api_key = reveal("--teacher-api-key", self.flags.teacher_api_key)
        self._endpoints = {
            name: Endpoint(f"{url.rstrip('/')}/generate", config.reward, api_key)
            for name, url in self.flags.teacher_urls.items()
        }

    def score(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples with `teacher_log_probs` from their own teachers, and `teacher_top` if
        the loss needs it; one request a sample. Raises TrainingError for a sample that its teacher
        did not score, since nothing can stand in for a score."""
        if not self._endpoints:
            return samples
        numbers: dict[str, list[int]] = {name: [] for name in self._endpoints}
        for number, one in enumerate(samples):
            if one.trajectory.num_sampled:
                key = self.flags.teacher_key
                name = str(one.prompt.metadata[key]) if key else ""
                numbers[name].append(number)
        begun = {
            name: self._endpoints[name].begin([_body(samples[i], self.top_k) for i in theirs])
            for name, theirs in numbers.items()
        }
        found: dict[int, Said] = {}
        for name, wait in begun.items():
            for number, answer in zip(numbers[name], wait(), strict=True):
                sample = samples[number]
                said = _said(answer, sample, self.top_k)
                if isinstance(said, Failure):
                    raise TrainingError(
                        f"{FLAG}={self.flags.teacher_urls[name]}: {sample.name}: the teacher "
                        f"{said.reason}. See to its server, and resume from the last checkpoint with "
                        "--load."
                    )
                found[number] = said
        return [found.get(i, Said([], [])).beside(one) for i, one in enumerate(samples)]


def _body(sample: Sample, top_k: int) -> dict[str, Any]:
    if sample.trajectory.kept_tokens:
        raise TrainingError(
            f"{FLAG}: {sample.name}: some tokens were drawn from a part of the vocabulary (top_p, "
            "top_k, min_p or a grammar), and a server gives log-probabilities over all of it. Have the "
            "episode ask for all, or load the teacher with --teacher-checkpoint."
        )
    return _question(sample.token_ids, sample.trajectory.sampled.index(True), top_k)


def _question(token_ids: Sequence[int], first: int, top_k: int) -> dict[str, Any]:
    """Return the request for the log-probabilities of tokens from position `first` (> 0) on, and of
    the `top_k` likeliest tokens there. Source: GenerateReqInput, sglang/srt/managers/io_struct.py.
    The first entry of the answer is null: it belongs to the token before. Stock SGLang scores a
    prompt at temperature 1 and ignores the request's."""
    return {
        "input_ids": [*token_ids],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": first - 1,
        "top_logprobs_num": top_k,
    }


def _said(answer: Any, sample: Sample, top_k: int) -> Said | Failure:
    """Return the scores of the sampled tokens, out of all scored tokens."""
    sampled = sample.trajectory.sampled
    first = sampled.index(True)
    said = _answered(answer, len(sampled) - first, top_k)
    if isinstance(said, Failure):
        return said
    wanted = sampled[first:]
    return Said([*compress(said.log_probs, wanted)], [*compress(said.likeliest, wanted)])


def _answered(answer: Any, count: int, top_k: int) -> Said | Failure:
    if isinstance(answer, Failure):
        return answer
    try:
        meta = answer["meta_info"]
        values = [float(entry[0]) for entry in meta["input_token_logprobs"][1:]]
        rows = meta["input_top_logprobs"][1:] if top_k else [[]] * count
        likeliest = [[(float(value), int(token)) for value, token, *_ in row] for row in rows]
    except (KeyError, IndexError, TypeError, ValueError):
        return Failure(reason="answered without log-probabilities of the tokens")
    if len(values) != count or not all(map(math.isfinite, values)):
        finite = sum(map(math.isfinite, values))
        return Failure(reason=f"gave {finite} finite log-probabilities for {count} tokens")
    if [len(row) for row in likeliest] != [top_k] * count:
        return Failure(
            reason=f"did not give the --opd-top-k={top_k} likeliest tokens of each place"
        )
    return Said(values, likeliest)


def require_teacher_servers(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError for a teacher that does not answer, that has another tokenizer than the
    policy, or that gives no log-probabilities of a prompt. tokenizer: the policy's."""
    top_k = config.distillation.loss_top_k
    for url in config.distillation.teacher_urls.values():
        _require_tokenizer(config, url, tokenizer)
        if top_k >= len(tokenizer):
            raise ConfigError(
                f"--opd-top-k={top_k}: the policy and its teacher know {len(tokenizer)} tokens. Give "
                "fewer."
            )
        (answer,) = _ask(config, url, "/generate", [_question([0, 0], 1, top_k)])
        said = _answered(answer, 1, top_k)
        if isinstance(said, Failure):
            raise ConfigError(
                f"{FLAG}={url}: tried on two tokens, the teacher {said.reason}. Start a server with "
                "`onpolicy serve`."
            )


def _require_tokenizer(config: TrainConfig, url: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError for the first token that the teacher decodes to another text."""
    tokens = [[token] for token in sorted(tokenizer.get_vocab().values())]
    parts = [tokens[i : i + _TOKENS_AT_ONCE] for i in range(0, len(tokens), _TOKENS_AT_ONCE)]
    bodies = [{"tokens": part, "skip_special_tokens": False} for part in parts]
    for part, answer in zip(parts, _ask(config, url, "/detokenize", bodies), strict=True):
        theirs = answer.get("text") if isinstance(answer, dict) else None
        ours = tokenizer.batch_decode(part, skip_special_tokens=False)
        if not isinstance(theirs, list) or len(theirs) != len(ours):
            raise ConfigError(
                f"{FLAG}={url}: what answers there is no SGLang server with a tokenizer, which is "
                "compared with the policy's. Start one with `onpolicy serve`."
            )
        for (token,), text, other in zip(part, ours, theirs, strict=True):
            if text != other:
                raise ConfigError(
                    f"{FLAG}={url}: its tokenizer is another than the policy's (token {token} is "
                    f"{other!r} there and {text!r} here), so it cannot score the policy's tokens. "
                    "Choose a teacher with the tokenizer of --hf-checkpoint."
                )


def _ask(config: TrainConfig, url: str, path: str, bodies: Sequence[Any]) -> list[Any]:
    """Return the teacher's answers. Raises ConfigError if it does not answer."""
    api_key = reveal("--teacher-api-key", config.distillation.teacher_api_key)
    answers = Endpoint(url.rstrip("/") + path, config.reward, api_key).begin(bodies)()
    for answer in answers:
        if isinstance(answer, Failure):
            raise ConfigError(
                f"{FLAG}={url}: the teacher {answer.reason}. Start a server with `onpolicy serve`, and "
                "give the URL and, as --teacher-api-key, the key that it prints."
            )
    return answers
