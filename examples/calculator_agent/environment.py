"""A calculator for products, and the price of a call: `--environment environment.py:Calculator`."""

from __future__ import annotations

from onpolicy.agents.tools.calculator import Calculator as Tool

PRICE = 0.3
MOST_CALLS = 2


class Calculator:
    """An action is a call, `[347*589]`, or what the policy says the product is.

    It reads what the calculator finds in parentheses. The reward is 1 for the right product, less the
    price of the calls.
    """

    stop = ("]",)

    def reset(self, prompt):
        self._label, self._num_calls = prompt.label, 0

    async def step(self, action):
        if not action.endswith("]"):
            return "", float(action == self._label) - PRICE * self._num_calls, True
        self._num_calls += 1
        found = await Tool().run(action[1:-1])
        text = found.text if found.fault is None else "0"
        is_last = self._num_calls == MOST_CALLS
        return f"({text})", -PRICE * self._num_calls if is_last else 0.0, is_last
