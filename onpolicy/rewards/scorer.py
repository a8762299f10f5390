"""Scoring of samples: ask the rules, combine their numbers into one reward, and bound their failures.

Failures are logged and counted; a run ends if a rule fails on too many samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from onpolicy.config.groups import RewardConfig
from onpolicy.config.groups.reward_flags import REMOTE, is_function, name_of
from onpolicy.errors import ConfigError, RewardError
from onpolicy.rewards import ANSWER, Answers, Failure, Numbers
from onpolicy.rewards.endpoint import Judge, RemoteReward, check_metadata
from onpolicy.rewards.labels import Refused, refused_labels, told
from onpolicy.rewards.scoring_workers import Workers
from onpolicy.system.number_arrays import Floats, Ints
from onpolicy.token_weights import TOKEN_WEIGHTS
from onpolicy.trajectory import Completion, FinishReason, Trajectory
from onpolicy.types import Prompt, Sample

logger = logging.getLogger(__name__)

Groups = Sequence[Sequence[Sample]]

Asked = RemoteReward | Judge
ASKED: dict[str, type[Asked]] = {"remote_rm": RemoteReward, "judge": Judge}


class Scorer:
    """A scorer that sets the rewards of samples by the configured rules. Rewards depend on the
    samples alone: neither on the number of workers nor on who ends first."""

    def __init__(self, config: RewardConfig):
        self.config, self.sources = config, config.sources
        self._workers: Workers | None = None
        self._remotes: dict[str, Asked] = {}
        self._imported: set[str] = set()
        self._failures = Failures(config.rm_max_error_rate)

    def refused_labels(self, prompts: Sequence[Prompt]) -> list[Refused]:
        """Return the labels that a built-in rule cannot read, or for which it scores a right answer
        as wrong."""
        return refused_labels(
            prompts, lambda prompt: filter(_is_ours, self._sources_of(prompt)), self.config
        )

    def check_labels(self, prompts: Sequence[Prompt], name: str) -> None:
        """Raise ConfigError if there are `refused_labels`, with their number, or if JSON cannot
        hold a column that a service gets; `name`: flag and file."""
        if refused := self.refused_labels(prompts):
            raise ConfigError(f"{name}: {told(refused, len(prompts), self._name)}")
        for prompt in prompts:
            try:
                if "remote_rm" in self._sources_of(prompt):
                    check_metadata(prompt)
            except ValueError as error:
                raise ConfigError(
                    f"{name}: prompt {prompt.index}, {error}. {self._name('remote_rm')} is sent all "
                    "columns as JSON. Write it as text, or drop the column."
                ) from error

    def try_out(self, prompt: Prompt) -> Collection[str]:
        """Score a made-up response to `prompt`, its label, once by every rule that is not built in.
        Returns the terms of the loss whose tokens they weigh. Raises ConfigError if that fails. A
        function that takes groups gets two such samples."""
        given: dict[str, Numbers] = {}
        tried = [source for source in self._sources_of(prompt) if not _is_ours(source)]
        functions = list(filter(is_function, tried))
        workers = Workers(self.config, functions, count=1, is_trial=True) if functions else None
        try:
            for source in tried:
                if workers is not None and is_function(source):
                    made_up = [_made_up(prompt, i) for i in range(1 + self.config.group_rm)]
                    answers = workers.ask(source, [made_up])
                else:
                    answers = self._remote(source).ask([_made_up(prompt, 0)])
                given[source] = self._successful(source, answers())
        finally:
            if workers is not None:
                workers.close()
        weighed = _made_up(prompt, 0)
        try:
            self._weigh(weighed, given)
        except RewardError as error:
            raise ConfigError(str(error)) from None
        return weighed.token_weights.keys()

    def _successful(self, source: str, answers: Sequence[Numbers | Failure]) -> Numbers:
        """Return all numbers of the answers. Raises ConfigError if one failed."""
        found: Numbers = {}
        for answer in answers:
            if isinstance(answer, Failure):
                raise ConfigError(
                    answer.reason if answer.in_loading else self._refusal(source, answer.reason)
                )
            found |= answer
        return found

    def _refusal(self, source: str, reason: str) -> str:
        one = 'a number, or a dict with one under "score"'
        rule = f"It must take one Sample and return {one}"
        if not is_function(source):
            rule = "It must answer before a run is started"
        elif self.config.group_rm:
            rule = f"It must take a list of Samples and return a list: for each {one}"
        return (
            f"{self._name(source)}: tried on the first prompt with its label as the response, it "
            f"{reason}. {rule}; see docs/rewards.md."
        )

    def score(self, groups: Groups) -> dict[str, float]:
        """Set the reward of every sample; return metrics. groups: samples by their prompts.

        A sample on which any of its rules fails or is late has no reward (`has_failed`): a sum
        without a term is on another scale than the sums beside it. Raises RewardError if more fail
        than --rm-max-error-rate allows, if a rule can no longer be loaded, or if there is no rule.
        """
        samples = list(chain.from_iterable(groups))
        for sample in samples:
            if not self._sources_of(sample.prompt):
                raise RewardError(
                    f"{sample.name}: its episode said no reward, and no rule would. Say one, or give "
                    "--rm-type, --custom-rm-path or --rewards."
                )
        theirs = chain.from_iterable(self._sources_of(sample.prompt) for sample in samples)
        sources = [*self.sources, *sorted({*theirs} - {*self.sources})]
        self._import([source for source in sources if source not in REMOTE])
        asked = {
            source: [[s for s in group if source in self._sources_of(s.prompt)] for group in groups]
            for source in sources
        }
        answers = {source: self._ask(source, those) for source, those in asked.items()}
        given: dict[int, dict[str, Numbers | Failure]] = {id(sample): {} for sample in samples}
        found = {source: wait() for source, wait in answers.items()}
        metrics = {"rollout/reward_timeouts": 0.0, "rollout/reward_errors": 0.0}
        metrics["rollout/reward_repeats"] = float(self._say_repeats())
        for source, of_each in found.items():
            pairs = [*zip(chain.from_iterable(asked[source]), of_each, strict=True)]
            self._failures.count(self._name(source), pairs, metrics)
            for sample, answer in pairs:
                given[id(sample)][source] = answer
        for sample in samples:
            self._reward(sample, given[id(sample)])
        metrics["rollout/num_unscored"] = float(sum(sample.has_failed for sample in samples))
        return metrics

    def _say_repeats(self) -> int:
        """Log the repeated calls, and return their number."""
        repeated = self._workers.take_repeated() if self._workers is not None else []
        if repeated:
            logger.warning(
                "%d calls of reward rules were repeated; the first %s", len(repeated), repeated[0]
            )
        return len(repeated)

    def _ask(self, source: str, groups: Groups) -> Answers:
        if source in REMOTE:
            return self._remote(source).ask([*chain.from_iterable(groups)])
        assert self._workers is not None
        return self._workers.ask(source, groups)

    def _remote(self, source: str) -> Asked:
        """Return the client of a remote rule, made once, since it remembers how requests end."""
        if source not in self._remotes:
            self._remotes[source] = ASKED[source](self.config)
        return self._remotes[source]

    def _import(self, local: Sequence[str]) -> None:
        """Start processes that have imported all these rules, which costs no sample's time then."""
        if not self._imported.issuperset(local):
            self.close()
            self._imported |= {*local}
            self._workers = Workers(self.config, sorted(self._imported))

    def _sources_of(self, prompt: Prompt) -> Mapping[str, float]:
        """Return the rules of a prompt's samples with their weights: its own, or else the run's."""
        return {prompt.rule: 1.0} if prompt.rule else prompt.rewards or self.sources

    def _reward(self, sample: Sample, given: Mapping[str, Numbers | Failure]) -> None:
        """Set the reward, its parts and the first answer from the results of each rule."""
        weights, prompt = self._sources_of(sample.prompt), sample.prompt
        in_order = {source: given[source] for source in weights}
        said = {s: x for s, x in in_order.items() if not isinstance(x, Failure)}
        sample.has_failed = len(said) < len(weights)
        answers = [numbers.pop(ANSWER) for numbers in said.values() if ANSWER in numbers]
        sample.answer = answers[0] if answers else None
        self._weigh(sample, said)
        is_one = bool(prompt.rule or not (prompt.rewards or self.config.rewards))
        sample.reward_parts = {
            _part(source, name, is_one): x
            for source, numbers in said.items()
            for name, x in numbers.items()
            if not (is_one and name == "score")
        }
        if sample.has_failed:
            sample.reward = math.nan
        elif is_one:
            (numbers,) = said.values()
            sample.reward = numbers["score"]
        else:
            sample.reward = sum(weights[source] * x["score"] for source, x in said.items())

    def _weigh(self, sample: Sample, given: Mapping[str, Numbers]) -> None:
        """Set the token weights. Raises RewardError if two rules give weights for one term."""
        said_by: dict[str, str] = dict.fromkeys(sample.token_weights, "its episode")
        for source, numbers in given.items():
            name, weights = self._name(source), numbers.pop(TOKEN_WEIGHTS, {})
            if twice := said_by.keys() & weights:
                (term, *_) = sorted(twice)
                raise RewardError(
                    f"{sample.name}: {said_by[term]} and {name} say token_weights[{term!r}]: a token "
                    "has one. Have one of them say it."
                )
            said_by |= dict.fromkeys(weights, name)
            sample.token_weights |= weights

    def _name(self, source: str) -> str:
        """Return the flag that requests the rule, for messages."""
        return f"{self.config.flag}={source}" if source in self.sources else f"the reward {source}"

    def start(self) -> None:
        """Start the processes of the run's rules; return at once."""
        if local := [source for source in self.sources if source not in REMOTE]:
            self._import(local)
            assert self._workers is not None
            self._workers.start()

    def close(self) -> None:
        """End all processes that were started to score."""
        if self._workers is not None:
            self._workers.close()


def _part(source: str, name: str, is_one: bool) -> str:
    """Return the name of a rule's number among the metrics."""
    if is_one:
        return name
    return name_of(source) if name == "score" else f"{name_of(source)}/{name}"


def _is_ours(source: str) -> bool:
    """Return whether the rule is built in."""
    return source not in REMOTE and not is_function(source)


def _made_up(prompt: Prompt, sample_index: int) -> Sample:
    return Sample(
        prompt=prompt,
        sample_index=sample_index,
        trajectory=Trajectory.begin(prompt.prompt_ids, prompt.images).plus(
            Completion(
                response_ids=Ints(prompt.prompt_ids[-1:]),
                rollout_log_probs=Floats([-1.0]),
                finish_reason=FinishReason.STOP,
                weight_version=0,
                num_cached_tokens=0,
            ),
            temperature=1.0,
        ),
        response=prompt.label or "",
    )


class Failures:
    """The failures of a run's rules; each rule's first is logged with all details."""

    def __init__(self, limit: float):
        """Take `limit`, the share of samples scored at once on which a rule may fail."""
        self._limit, self._reported = limit, set[str]()

    def count(
        self,
        name: str,
        pairs: Sequence[tuple[Sample, Numbers | Failure]],
        metrics: dict[str, float],
    ) -> None:
        """Log a rule's failures, and add them to the metrics. Raises RewardError for too many."""
        failed = [(sample, answer) for sample, answer in pairs if isinstance(answer, Failure)]
        if not failed:
            return
        num_late = sum(failure.is_late for _, failure in failed)
        metrics["rollout/reward_timeouts"] += num_late
        metrics["rollout/reward_errors"] += len(failed) - num_late
        sample, failure = failed[0]
        count = f"{name}: {len(failed)} of {len(pairs)} samples could not be scored"
        logger.warning(
            "%s; nothing is learnt from them, and a run in which they can be scored has another hash. "
            "The first, %s, %s", count, sample.name, failure.reason,
        )  # fmt: skip
        if name not in self._reported:
            self._reported.add(name)
            logger.error(
                "The first failure of %s: %s, label %r, response %.500r\n%s",
                name, sample.name, sample.prompt.label, sample.response, failure.traceback,
            )  # fmt: skip
        self._require_few(count, failed, len(pairs))

    def _require_few(
        self, count: str, failed: Sequence[tuple[Sample, Failure]], num_samples: int
    ) -> None:
        mend = "Mend the rule and resume from the last checkpoint with --load"
        for _, failure in failed:
            if failure.in_loading:
                raise RewardError(f"{count}: a new worker {failure.reason}. {mend}.")
        if len(failed) > self._limit * num_samples:
            sample, failure = failed[0]
            late = " or a higher --rm-time-limit," if failure.is_late else ""
            raise RewardError(
                f"{count}, more than --rm-max-error-rate={self._limit:g} of them. The first, "
                f"{sample.name}, {failure.reason}. {mend},{late} or raise the limit."
            )
