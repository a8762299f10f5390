"""Which rollouts are drawn under which weights: a rule, so that no clock decides what is learnt from.

Version v of the weights is pushed when v rollouts have been trained on. With a lag of K the samples of
step k are drawn under version max(0, k - K), all of them before the next version is pushed:

    lag 0    push 0 | draw 0 | train 0 | push 1 | draw 1 | train 1 | push 2 ...

    lag 1    push 0 | draw 0 | train 0 | push 1 | train 1 | push 2 | train 2 | push 3 ...
                             | draw 1  |        | draw 2  |        | draw 3  |
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which rollouts are drawn under which weights, of a run that goes from rollout `first` to
    `last`."""

    lag: int
    first: int
    last: int

    def version_of(self, step: int) -> int:
        """The version that the rollout of a step is drawn under."""
        return max(self.first, step - self.lag)

    def drawn_under(self, version: int) -> range:
        """The steps whose rollouts are drawn under a version, in their order."""
        begins = version if version == self.first else version + self.lag
        return range(begins, min(version + self.lag + 1, self.last))
