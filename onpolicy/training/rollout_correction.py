"""Corrections of an unaligned rollout's samples before their loss, by `fallback_correction`.

All micro-batches of a rollout are processed at once, since weights may be normalised and metrics
averaged over the global batch; the result is the last stage of each (`batch.py`). Where the trainer's
log-probabilities are not computed before the loss, the loss takes weights and rejection from its own:
in bypass (--use-rollout-logprobs), and in a rollout's only optimizer step, where old and current policy
are the same (`needs_scores`). The user's own function (`miles_correction`) takes the place of
importance weights and rejection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fallback_correction.config import CorrectionConfig
from fallback_correction.correction import correct
from fallback_correction.discrepancy import DiscrepancyPenalty
from fallback_correction.mismatch_metrics import estimator_report, mismatch_metrics
from fallback_correction.tokens import TokenBatch, global_token_mean, without_nonfinite
from onpolicy.algorithm.objectives import token_shares
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_values
from onpolicy.config.groups import FallbackConfig
from onpolicy.errors import ConfigError, TrainingError
from onpolicy.ops.likeliest_tokens import LikeliestTokens
from onpolicy.system.user_functions import load_function
from onpolicy.training import distributed
from onpolicy.training.batch import CustomCorrection, MicroBatch, completed
from onpolicy.training.distributed import any_data, gather_vectors
from onpolicy.training.engine import ShardedModel
from onpolicy.training.loss import weighted_sum

Metrics = dict[str, float]

Steps = Sequence[Sequence[MicroBatch]]
"""Micro-batches of a rollout, by optimizer step."""

TrainedStep = tuple[Sequence[MicroBatch], Sequence[Tensor]]
"""(micro-batches, log-probabilities of each from the loss's own forward pass)"""

GIVEN = (
    "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths",
    "response_lengths", "parallel_state", "max_seq_lens", "cur_log_probs",
)  # fmt: skip
"""Parameters that a function may have, besides `args`."""


class Corrections:
    """The corrections that a run's flags select, and the multiplier that the penalty carries over.

    A correction works on trajectories as sequences, an aggregation on episodes. A trajectory is one
    path of tokens, whose ratio is the product over its tokens; an episode's ratio would be the product
    over all its branches, and its variance would grow with their number.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        self._penalty = DiscrepancyPenalty(config.fallback.dc) if config.fallback.dc.mode else None
        self.use(with_stale_samples(config), centers=True)

    def use(self, flags: FallbackConfig, centers: bool) -> None:
        """Take corrections from these flags from now on. centers: whether scores are centered, if
        the objective says so."""
        self.flags, self.weights = flags, weight_correction(flags)
        rejects = CorrectionConfig(nonfinite="reject") if flags.tis_nonfinite == "reject" else None
        self.applied = self.weights or rejects
        self.penalty = self._penalty if flags.dc.mode else None
        self.custom = self._custom(flags)
        self.bypass = flags.use_rollout_logprobs
        self.num_centered = self.config.num_centered * centers

    def _custom(self, flags: FallbackConfig) -> CustomCorrection | None:
        """Load the user's own correction, if there is one; it gets all flags of the run, with `flags`
        in force.

        Raises ConfigError if it cannot be imported, or has parameters that no caller gives.
        """
        if not (path := flags.custom_tis_function_path):
            return None
        function = load_function(path, "--custom-tis-function-path")
        args = SimpleNamespace(**self.config.to_dict() | flag_values(flags))
        return miles_correction(function, args, bypass=flags.use_rollout_logprobs)

    def needs_scores(self, num_steps: int) -> bool:
        """Return whether a corrected rollout needs old log-probabilities before the loss.

        In the only optimizer step the loss's own log-probabilities are the old policy's, as in verl's
        on-policy mode. They come too late for a second step, and for corrections that look at the whole
        batch.
        """
        whole = self.weights is not None and self.weights.needs_whole_batch
        return num_steps > 1 or whole or self.penalty is not None

    @property
    def kl_top_k(self) -> int:
        """Return the number of likeliest tokens over whose KL sequences are rejected; 0 for none."""
        bounds_kl = self.weights is not None and self.weights.bounds_kl
        return self.config.num_likeliest * bounds_kl

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next rollout depends on."""
        return {} if self._penalty is None else {"penalty": self._penalty.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._penalty is not None and "penalty" in state:
            self._penalty.load_state_dict(state["penalty"])

    def weigh(self, steps: Steps, *, active: bool) -> tuple[list[list[MicroBatch]], Metrics]:
        """Make the last stage of a rollout's micro-batches and return it with metrics; collective.

        active: whether to correct; an aligned rollout needs only shares. Raises NonfiniteError as
        `correct` does.
        """
        metrics: Metrics = {}
        if active:
            steps = self._without_nonfinite(steps)
            if self.penalty is not None:
                steps, metrics = self._penalised(steps, self.penalty)
        weighed = [self._weigh_step(step, active) for step in steps]
        return [step for step, _ in weighed], metrics | _means([found for _, found in weighed])

    def measure(self, steps: Sequence[TrainedStep], lags: Sequence[int] = ()) -> Metrics:
        """Measure the mismatch of the engines on a rollout's first optimizer step, as a whole and by
        staleness; collective.

        It uses the log-probabilities of the loss's own forward pass, which exist in every mode. The
        metrics include the corrections that the loss of each step applied itself.
        """
        metrics = self._measure_all(steps) if self.flags.is_measured else {}
        if any(lags):
            batches, train_log_probs = steps[0]
            tokens = _tokens(batches, train_log_probs)
            learnt = [completed(*pair) for pair in zip(batches, train_log_probs, strict=True)]
            metrics |= lag_metrics(learnt, tokens, lags, self.flags.tis_upper_bound)
        return metrics

    def _measure_all(self, steps: Sequence[TrainedStep]) -> Metrics:
        batches, train_log_probs = steps[0]
        tokens = _tokens(batches, train_log_probs)
        advantages = _advantages(batches)
        upper = self.flags.tis_upper_bound
        metrics = {
            **mismatch_metrics(tokens, gather_vectors),
            **estimator_report(tokens, advantages, upper, gather_vectors),
        }
        if (config := self.weights) and batches[0].correction is not None:
            metrics |= _means(
                [
                    correct(_tokens(*step), config, gather_vectors, _advantages(step[0])).metrics
                    for step in steps
                ]
            )
        return metrics

    def without_replay(self, step: Sequence[MicroBatch], policy: ShardedModel) -> Metrics:
        """Return the mismatch of the engines without routing replay, if there is any and it is
        measured; collective."""
        replays = any_data(any(batch.packed.routed_experts is not None for batch in step))
        if not (replays and self.flags.is_measured):
            return {}
        scores = policy.score([batch.packed.with_own_routing() for batch in step])
        tokens = _tokens(step, [each.log_probs for each in scores])
        found = mismatch_metrics(tokens, gather_vectors)
        return {"routing/k3_without_replay": found["mismatch/k3"]}

    def _without_nonfinite(self, steps: Steps) -> Steps:
        """Mask tokens that --tis-nonfinite rejects, before anything else reads them."""
        if self.applied is None or self.applied.nonfinite != "reject":
            return steps
        finite = without_nonfinite(_old_tokens(_rollout(steps)), self.applied)
        return [[replace(b, mask=part) for b, part in step] for step in _split(steps, finite.mask)]

    def _penalised(self, steps: Steps, penalty: DiscrepancyPenalty) -> tuple[Steps, Metrics]:
        rollout = _rollout(steps)
        advantages = _advantages(rollout)
        finite = replace(_old_tokens(rollout), mask=torch.cat([batch.mask for batch in rollout]))
        penalised, _ = penalty.apply(finite, advantages, gather_vectors)
        parts = _split(steps, penalised)
        steps = [[replace(batch, advantages=part) for batch, part in step] for step in parts]
        return steps, penalty.step()

    def _weigh_step(
        self, step: Sequence[MicroBatch], active: bool
    ) -> tuple[list[MicroBatch], Metrics]:
        tokens, metrics = _old_tokens(step), dict[str, float]()
        kept = centered = torch.cat([batch.mask for batch in step])
        weights = torch.ones_like(tokens.train_log_probs)
        # In bypass, and without old log-probabilities, the loss corrects itself (`completed`).
        left = active and (self.bypass or step[0].old_log_probs is None)
        if active and not left and self.weights is not None:
            correction = correct(tokens, self.weights, gather_vectors, _advantages(step))
            tokens, metrics = replace(tokens, mask=correction.counted), correction.metrics
            kept, centered = correction.mask, correction.centered
            weights = weights if correction.weights is None else correction.weights
        shares = step_shares(tokens, step, self.config)
        lens = [len(batch.mask) for batch in step]
        columns = (shares, kept, weights, centered)
        parts = zip(step, *(column.split(lens) for column in columns), strict=True)
        k = self.num_centered if active else 0
        weighed = [
            replace(
                batch,
                packed=replace(batch.packed, likeliest=likeliest_tokens(batch, k)),
                centering=(self.weights or CorrectionConfig()) if k else None,
                centered=is_centered,
                shares=torch.where(batch.mask, share, 0),
                kept=keep,
                importance_weights=weight,
                correction=self.applied if left else None,
                custom=self.custom if active else None,
            )
            for batch, share, keep, weight, is_centered in parts
        ]
        return weighed, metrics


def with_stale_samples(config: TrainConfig) -> FallbackConfig:
    """Return the corrections of a run: those that its flags select, or what samples of earlier weights
    need if they select none."""
    flags, plan = config.fallback, config.plan
    if plan.bypasses_lag:
        return replace(flags, use_rollout_logprobs=True)
    return replace(flags, use_tis=True) if plan.weighs_lag else flags


def weight_correction(flags: FallbackConfig) -> CorrectionConfig | None:
    """Return the importance weights and rejection that the flags select; None if the user's own
    function replaces them, or if at most the penalty is selected."""
    replaced = "custom_tis_function_path" in flags.corrections
    return flags.correction() if {*flags.corrections} - {"dc_mode"} and not replaced else None


def likeliest_tokens(batch: MicroBatch, k: int) -> LikeliestTokens | None:
    """Return the k likeliest tokens that engines returned with each sampled token; None for 0. Raises
    TrainingError for a sample without them."""
    if not k:
        return None
    device, rows = batch.mask.device, [s.trajectory.likeliest for s in batch.samples]
    if batch.is_filler:
        tokens = torch.arange(k, device=device).repeat(len(batch.mask), 1)
        return LikeliestTokens(tokens, torch.zeros_like(tokens, dtype=torch.float32))
    for sample, each in zip(batch.samples, rows, strict=True):
        if {*map(len, each)} != {8 * k}:
            raise TrainingError(
                f"--opd-top-k={k}: {sample.name}: its engine did not return the {k} likeliest tokens "
                "with each token, as one that was asked before --policy-loss, --rs-rules or --opd-top-k "
                "changed. Give the former flags."
            )
    return LikeliestTokens.of([x for each in rows for x in each], device)


def step_shares(tokens: TokenBatch, step: Sequence[MicroBatch], config: TrainConfig) -> Tensor:
    """Return each token's share of the mean over all counting tokens of an optimizer step;
    collective."""
    return token_shares(
        tokens,
        config.loss_aggregation,
        gather_vectors,
        scale_length=config.rollout.rollout_max_response_len,
        episodes=torch.tensor([n for b in step for n in b.episodes], device=tokens.mask.device),
    )


def lag_metrics(
    batches: Sequence[MicroBatch], tokens: TokenBatch, lags: Sequence[int], upper: float
) -> dict[str, float]:
    """Return `lag/*` of an optimizer step's micro-batches; collective.

    tokens: all of their tokens, with the trainer's log-probabilities before the step. lags: the lags in
    the whole rollout, the same on every rank. upper: the largest weight.
    """
    each = torch.cat([batch.lags for batch in batches])
    kept = torch.cat([batch.kept for batch in batches])
    high = (tokens.train_log_probs - tokens.rollout_log_probs).exp() > upper

    def mean(batch: TokenBatch, values: Tensor) -> float:
        return global_token_mean(batch, values.float(), gather_vectors)

    metrics = {"lag/mean": mean(tokens, each)}
    for lag in lags:
        ours = replace(tokens, mask=tokens.mask & (each == lag))
        distance = mismatch_metrics(ours, gather_vectors)
        metrics |= {
            f"lag/{lag}/share": mean(tokens, each == lag),
            f"lag/{lag}/k3": distance["mismatch/k3"],
            f"lag/{lag}/ess": distance["mismatch/ess"],
            f"lag/{lag}/clip_share": mean(ours, high),
            f"lag/{lag}/rejected_share": mean(ours, ~kept),
        }
    return metrics


def _rollout(steps: Steps) -> list[MicroBatch]:
    return [batch for step in steps for batch in step]


def _old_tokens(batches: Sequence[MicroBatch]) -> TokenBatch:
    """Return both engines' log-probabilities before the first optimizer step, for every sampled token;
    the rollout's for both where the trainer's were not computed."""
    old = [b.rollout_log_probs if b.old_log_probs is None else b.old_log_probs for b in batches]
    return _tokens(batches, old)


def _advantages(batches: Sequence[MicroBatch]) -> Tensor:
    return torch.cat([batch.advantages for batch in batches])


def _tokens(batches: Sequence[MicroBatch], train_log_probs: Sequence[Tensor]) -> TokenBatch:
    kl = [batch.kl for batch in batches if batch.kl is not None]
    return TokenBatch.packed(
        torch.cat(list(train_log_probs)),
        torch.cat([batch.rollout_log_probs for batch in batches]),
        [n for batch in batches for n in batch.response_lens],
        torch.cat([batch.sampled for batch in batches]),
        [n for batch in batches for n in batch.turn_lens],
        torch.cat(kl) if kl else None,
    )


def _split(steps: Steps, values: Tensor) -> list[list[tuple[MicroBatch, Tensor]]]:
    """Pair every micro-batch with its part of the values of all tokens."""
    parts = iter(values.split([len(batch.mask) for batch in _rollout(steps)]))
    return [[(batch, next(parts)) for batch in step] for step in steps]


def _means(each: Sequence[Metrics]) -> Metrics:
    return {name: fmean(step[name] for step in each) for name in each[0]}


def miles_correction(
    function: Callable[..., Any], args: object, *, bypass: bool = False
) -> CustomCorrection:
    """Wrap the user's own function as a correction of a micro-batch; it is called as Miles and slime
    call --custom-tis-function-path.

    Miles: `policy_loss_function` in miles/backends/training_utils/loss/hub/losses.py; slime: the same
    in slime/backends/megatron_utils/loss.py, without parallel_state and max_seq_lens.

    The function gets `args`, the per-token loss [R], lists of one tensor per sequence, and the
    parameters of `GIVEN` that its signature names; train_log_probs are the old policy's, or the loss's
    own where these were not computed before, as with `bypass`. It returns (loss [R], masks, metrics of
    [R]); metrics become `tis/<name>`, as shares of the global batch. Raises ConfigError if it has other
    required parameters.
    """
    names = _asked_for(function)

    def correction(
        loss: Tensor, log_probs: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        lens = batch.response_lens
        old = log_probs if bypass or batch.old_log_probs is None else batch.old_log_probs
        given = {
            "pg_loss": loss,
            "train_log_probs": old.split(lens),
            "rollout_log_probs": batch.rollout_log_probs.split(lens),
            "loss_masks": batch.mask.float().split(lens),
            "total_lengths": [len(s.token_ids) for s in batch.samples],
            "response_lengths": lens,
            "parallel_state": _parallel_state(),
            "max_seq_lens": None,  # Miles sets it for padded sequences; these are packed
            "cur_log_probs": log_probs.split(lens),
        }
        asked = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items() if k in names}
        loss, masks, found = function(args, **asked)
        metrics = {
            f"tis/{name}": weighted_sum(_flat(value), batch.shares) for name, value in found.items()
        }
        return loss, _flat(masks), metrics

    return correction


def _asked_for(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names among `GIVEN` that the function takes."""
    parameters = list(inspect.signature(function).parameters.values())[1:]  # after args
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return GIVEN
    needs = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if unknown := [name for name in needs if name not in GIVEN]:
        name = getattr(function, "__name__", function)
        raise ConfigError(
            f"--custom-tis-function-path: {name} needs {', '.join(unknown)}, which no caller gives. It "
            f"may ask for {', '.join(GIVEN)}, or take **kwargs."
        )
    return tuple(p.name for p in parameters if p.name in GIVEN)


def _parallel_state() -> ParallelState:
    if not dist.is_initialized():
        return ParallelState()
    data = GroupInfo(distributed.data_rank(), distributed.data_size(), distributed.data_group())
    return ParallelState(intra_dp=data)


def _flat(values: Any) -> Tensor:
    return torch.cat(list(values)) if isinstance(values, (list, tuple)) else values


@dataclass(frozen=True)
class GroupInfo:
    """A rank's place in a group, with Miles' field names."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelState:
    """A function's view of the ranks, after Miles' class of this name."""

    cp: GroupInfo = field(default_factory=GroupInfo)
    """Context-parallel group: always one rank, since sequences come whole under context parallelism
    too."""

    intra_dp: GroupInfo = field(default_factory=GroupInfo)
    """Group of ranks that hold other samples."""
