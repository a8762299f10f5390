"""The scale or soft cap that a causal LM applies to its logits after the output projection.

Both engines compute the projection themselves, so they must apply the rest too. The rule is
recognised by what the model computes: its own forward pass runs on stand-ins for its decoder and
its projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onpolicy.ops.base import Operators
from onpolicy.ops.checks.fixed_numbers import probe


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRule:
    """`softcap * tanh(factor * logits / divisor / softcap)`, every step rounded to their dtype.

    A step whose number is None is left out.
    """

    factor: float | None = None
    """Cohere's `logit_scale`."""

    divisor: float | None = None
    """Granite's `logits_scaling`."""

    softcap: float | None = None
    """Gemma-2's `final_logit_softcapping`."""

    def apply(self, operators: Operators, logits: Tensor) -> Tensor:
        """Apply the rule: [..., V] -> [..., V], element-wise."""
        if self.factor is not None:
            logits = logits * self.factor
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = operators.elementwise(torch.tanh, logits / self.softcap) * self.softcap
        return logits


def logits_rule(model: PreTrainedModel) -> LogitsRule | None:
    """Return the rule that `model` applies to its logits; None if it is none of the known ones."""
    try:
        got = _logits_on_stand_ins(model)
    except Exception:  # a model's own code may raise anything on stand-ins
        return None
    # Compare the model's logits with each candidate rule on the plain logits.
    plain = _head(_hidden())
    for rule in _candidates(model.config):
        if torch.equal(got, rule.apply(_Plain(), plain)):  # type: ignore[arg-type]
            return rule
    return None


class _Plain:
    """The one operator that a rule needs, in plain PyTorch."""

    def elementwise(self, function: Any, x: Tensor) -> Tensor:
        result: Tensor = function(x)
        return result


class _Output(SimpleNamespace):
    """A decoder's output: hidden states, and None under every other name."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        result: Tensor = self.last_hidden_state
        return result


def _hidden() -> Tensor:
    return (3 * probe(1, 4, 8, seed=1)).bfloat16()


def _head(hidden: Tensor) -> Tensor:
    """Compute a projection whose scaled output differs from the output of any scaled input."""
    return hidden.flip(-1) * 5 + 1


def _logits_on_stand_ins(model: PreTrainedModel) -> Tensor:
    stand_in: Any = object.__new__(type(model))
    vars(stand_in).update(vars(model))
    head = model.get_output_embeddings()
    name = next(name for name, child in model.named_children() if child is head)
    decoder = lambda *args, **kwargs: _Output(last_hidden_state=_hidden())  # noqa: E731
    vars(stand_in).update({name: _head, model.base_model_prefix: decoder})
    logits: Tensor = (
        type(model).forward(stand_in, input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits
    )
    return logits


def _candidates(config: Any) -> Iterator[LogitsRule]:
    yield LogitsRule()
    numbers = {
        "factor": getattr(config, "logit_scale", None),
        "divisor": getattr(config, "logits_scaling", None),
        "softcap": getattr(config, "final_logit_softcapping", None),
    }
    given = {name: number for name, number in numbers.items() if number is not None}
    for name, number in given.items():
        yield LogitsRule(**{name: number})
    yield LogitsRule(**given)
