"""Runs that keep what they trained on, and whether its tokens are of the weights that they say."""

from itertools import compress

from onpolicy.run.run import Run
from tests.support.tiny_policy import log_probs_of


class Keeps(Run):
    """Keeps the groups that each step was trained on, and the weights that it was trained from."""

    last = None

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.trained, self.policies = {}, {}
        Keeps.last = self

    def train(self, groups, step):
        self.trained[step] = groups
        weights = self.engines.trainer.weights
        self.policies[step] = {name: table.clone() for name, table in weights.items()}
        return super().train(groups, step)

    @property
    def samples(self):
        return [s for groups in self.trained.values() for group in groups for s in group.samples]


def require_weights_of_spans(kept):
    """Every sampled token has the log-probability of the version that its span says."""
    for trajectory in (sample.trajectory for sample in kept.samples):
        spans, tokens = trajectory.spans, trajectory.token_ids
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == trajectory.num_sampled
        for span in spans:
            policy = kept.policies[int(span.version)]
            scores = log_probs_of(policy, tokens[:1], tokens[1:], 1.0).tolist()
            own = [*compress(scores, trajectory.sampled[1:])]
            assert trajectory.rollout_log_probs[span.start : span.end] == own[span.start : span.end]
