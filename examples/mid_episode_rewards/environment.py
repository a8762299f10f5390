"""A choice and a lot, and what each pays at once: `--environment environment.py:Market`."""

from __future__ import annotations

INVEST, SAVE, DIGITS = "i", "s", "0123456789"

INVESTED_WELL, SAVED = 2.0, 1.0
LUCK = 4.0


class Market:
    """Two turns of one token each, in a year that the policy cannot see.

    The first is a choice: in a wild year investing pays 2, in a calm one saving pays 1, and all else
    nothing. The second is a lot, a digit: in a wild year it pays `luck` or costs it, as the prompt's row
    says of that digit; in a calm one it pays nothing. No lot depends on the choice.
    """

    stop = (INVEST, SAVE, *DIGITS)

    def __init__(self, luck: float = LUCK):
        self._luck, self._has_chosen = luck, False

    def reset(self, prompt):
        self._is_wild, self._lucky = prompt.label == "wild", prompt.metadata["lucky"]

    async def step(self, action):
        if self._has_chosen:
            return "", self._drawn(action), True
        self._has_chosen = True
        return ">", self._chosen(action), action not in (INVEST, SAVE)

    def _chosen(self, action):
        if self._is_wild:
            return INVESTED_WELL * (action == INVEST)
        return SAVED * (action == SAVE)

    def _drawn(self, action):
        if not self._is_wild:
            return 0.0
        return self._luck if action in self._lucky else -self._luck
