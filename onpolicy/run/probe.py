"""The comparison of engines and trainer after a push, for samples too stale to compare in training.

Each engine answers the same few requests. The trainer, which holds the pushed weights at that time,
scores the answers, and every log-probability is compared by bits. The governor decides by that.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fallback_correction.governor import READINGS
from fallback_correction.mismatch_metrics import mismatch_metrics
from fallback_correction.tokens import TokenBatch
from onpolicy.config import TrainConfig
from onpolicy.errors import ParityError
from onpolicy.parity import ParityCounts, compare_draws, compare_log_probs, compare_rows
from onpolicy.rollout.sample_requests import make_requests, require_version
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.inputs import Inputs

logger = logging.getLogger(__name__)

PROMPTS = 4
"""The number of training prompts that the probe uses, the first ones."""

LONGEST = 16

_NONE = ParityCounts()


class Probe:
    """Fixed requests, equal for every engine after every push."""

    def __init__(self, config: TrainConfig, inputs: Inputs, engines: EnginePair):
        self.config, self._engines = config, engines
        rollout = config.rollout
        params = inputs.params(rollout, min(LONGEST, rollout.rollout_max_response_len))
        prompts = inputs.prompts.prompts[: min(PROMPTS, config.engine.rollout_max_concurrency)]
        self._requests = make_requests(prompts, 1, params, config.seed, "probe")

    def compare(self) -> dict[str, float]:
        """Compare, and return metrics. Raises ParityError if tokens differ that must not."""
        # Requests are shared equally among the engines, so each engine answers all prompts once.
        requests = self._requests * len(self._engines.rollout.clients)
        completions = self._engines.generate(requests)
        for completion in completions:
            require_version(completion, self._engines.weight_version)
        temperature = self.config.rollout.rollout_temperature
        found = self._engines.rescore(requests, completions, temperature)
        train = [each.log_probs for each in found]
        rollout = [torch.tensor(c.rollout_log_probs.array) for c in completions]
        total = sum((compare_log_probs(*of)[0] for of in zip(train, rollout, strict=True)), _NONE)
        aligned = self._engines.contract.is_aligned
        for each, completion in zip(found, completions, strict=True):
            total += compare_draws(each.drawn, torch.tensor(completion.response_ids.array))[0]
            if aligned and self.config.parity.parity_check == "full":
                digests = torch.tensor(completion.row_digests, dtype=torch.int64)
                total += compare_rows(each.row_digests, digests)[0]
        if total.num_mismatched or total.num_drawn_otherwise or total.num_mismatched_rows:
            self._judge(total)
        return {
            "probe/num_compared_tokens": total.num_compared,
            "probe/num_mismatched_tokens": total.num_mismatched,
            "probe/max_ulp": total.max_ulp,
            **(total.draws("probe/") if aligned else {}),
            **_distances(train, rollout),
        }

    def _judge(self, total: ParityCounts) -> None:
        aligned = self._engines.contract.is_aligned
        on_mismatch = self.config.plan.on_mismatch(is_aligned=aligned)
        message = (
            f"version {self._engines.weight_version}: {total.num_mismatched} of {total.num_compared} "
            "tokens of the probe have another log-probability in training than in the engines that "
            f"were given the same weights, and {total.num_drawn_otherwise} are others than the trainer "
            "draws by the same seeds"
        )
        if total.num_mismatched_rows:
            message += (
                f"; {total.num_mismatched_rows} have another digest of the whole vocabulary's "
                "log-probabilities"
            )
        if on_mismatch == "fail":
            raise ParityError(
                f"{message}. No step was taken on samples of theirs. To find out which part differs, "
                f"run: onpolicy verify --hf-checkpoint {self.config.model.hf_checkpoint} --dtype "
                f"{self._engines.contract.dtype}{' --full-vocabulary' * bool(total.num_mismatched_rows)}"
            )
        if on_mismatch == "warn":
            logger.warning("%s", message)


def _distances(train: Sequence[Tensor], rollout: Sequence[Tensor]) -> dict[str, float]:
    """Return the metrics `probe/*` of READINGS; train, rollout: float32 [R] of each answer."""
    lengths = [len(scores) for scores in train]
    found = mismatch_metrics(TokenBatch.packed(torch.cat([*train]), torch.cat([*rollout]), lengths))
    return {f"probe/{name}": found[f"mismatch/{name}"] for name in READINGS}
