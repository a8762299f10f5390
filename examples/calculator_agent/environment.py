"""A calculator for products, and the price of a call: `--environment environment.py:Calculator`."""

from __future__ import annotations

from onpolicy.agents.tools.calculator import Calculator as Tool

PRICE = 0.4
MOST_CALLS = 2


class Calculator:
    """An action is a call, `[37*58]`, or what the policy says the product is.

    It reads what the calculator finds in parentheses. The reward is 1 for the right product, less the
    price of the calls. One call more than `most_calls` ends the episode; with 0 there is no calculator.
    """

    stop = ("]",)

    def __init__(self, most_calls: int = MOST_CALLS):
        self._most_calls, self._num_calls = most_calls, 0

    def reset(self, prompt):
        self._label = prompt.label

    async def step(self, action):
        paid = -PRICE * self._num_calls
        if not action.endswith("]"):
            return "", float(action == self._label) + paid, True
        if self._num_calls == self._most_calls:
            return "", paid, True
        self._num_calls += 1
        found = await Tool().run(action[1:-1])
        return f"({found.text if found.fault is None else 0})", 0.0, False
