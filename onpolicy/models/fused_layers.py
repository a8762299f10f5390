"""Parts of a layer fused into fewer kernels: norms with their neighbours, and linears of one input.

The rollout engine does this, since on a GPU the number of kernels limits a decode step; the trainer
keeps the parts separate. The residual sum is fused with the norm after it, and the norms of queries
and keys with the rotary embedding. Layers and attention modules are recognised by what they
compute: their own code runs on stand-ins for their parts. Linears that a module calls on one input
(q, k and v; an MLP's gate and up) become one larger product, since a column of a product has the
same bits whatever columns are beside it.

The engine tests at start-up, at the model's sizes, that no bit changes; parts for which this does
not hold stay separate.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from onpolicy.errors import ContractError
from onpolicy.models.norms import AlignedRMSNorm, NormKind
from onpolicy.models.rounded_inputs import operators_of
from onpolicy.ops.backends.base import FP8_BLOCK
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.fixed_numbers import probe
from onpolicy.ops.checks.rowwise_check import FEW_ROW_COUNTS as ROW_COUNTS

logger = logging.getLogger(__name__)

KeepsBits = Callable[[str, "Sizes"], bool]


def fuse_norms(model: nn.Module, operators: Operators) -> int:
    """Fuse the norms of an aligned model in place; return the number of fused modules.

    Call it after `align_modules`. Fused modules have no gradients.
    """
    keeps_bits = cache(partial(_keeps_bits, operators))
    return sum(
        _fuse_layer(module, keeps_bits) or _fuse_attention(module, keeps_bits)
        for module in model.modules()
    )


# Decoder layers: the residual sum after attention, and the norm of that sum.


def _fuse_layer(layer: Any, keeps_bits: KeepsBits) -> bool:
    if not is_usual_layer(layer):
        return False
    norm = layer.post_attention_layernorm
    if not keeps_bits("sum", Sizes.of(norm)):
        return False
    layer.forward = MethodType(_layer_forward, layer)
    return True


def _layer_forward(layer: Any, hidden_states: Tensor, **named: Any) -> Tensor:
    norm = layer.post_attention_layernorm
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **named)
    total, normal = norm.operators.add_rms_norm(
        attended, hidden_states, norm.scale, norm.kind.eps, norm.kind.round_last
    )
    out: Tensor = total + layer.mlp(normal)
    return out


_LAYER = {
    "input_layernorm": lambda x: 3 * x.roll(1, -1) - 1,
    "post_attention_layernorm": lambda x: 5 * x.flip(-1) + 2,
    "mlp": lambda x: 7 * x.roll(2, -1) + 0.5,
}


def is_usual_layer(module: Any) -> bool:
    """Return whether it computes `s + mlp(norm(s))`, s = x + attention(norm(x)).

    It must also pass all keywords on to its attention.
    """
    children = dict(module.named_children())
    if "forward" in vars(module) or children.keys() != {*_LAYER, "self_attn"}:
        return False
    if not _has_weight(children["post_attention_layernorm"]):
        return False
    x, given, got = probe(1, 3, 8, seed=1), {"position_embeddings": object()}, {}

    def attention(hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        got.update(named)
        return 11 * hidden_states.roll(3, -1) - 4, None

    stripped: Any = copy.copy(module)
    vars(stripped).update(_LAYER, self_attn=attention)
    try:
        out = type(module).forward(stripped, x, **given, own=1)
    except Exception:  # another kind of layer may raise anything on stand-ins
        return False
    total = x + attention(_LAYER["input_layernorm"](x))[0]
    want = total + _LAYER["mlp"](_LAYER["post_attention_layernorm"](total))
    handed_on = all(got.get(name) is value for name, value in {**given, "own": 1}.items())
    return isinstance(out, Tensor) and torch.equal(out, want) and handed_on


def _has_weight(norm: Any) -> bool:
    return isinstance(norm, AlignedRMSNorm) and norm.weight is not None


# Attention modules: the norms of their heads, and the rotary embedding.


def _fuse_attention(module: Any, keeps_bits: KeepsBits) -> bool:
    """Fuse the norms if the module only attends over the rotated norms of its projections."""
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if not all(map(_has_weight, norms)) or not hasattr(module, "operators"):
        return False
    q_norm, k_norm = cast(list[AlignedRMSNorm], norms)
    sizes = Sizes.of(q_norm)
    by_head = sizes == Sizes.of(k_norm) and sizes.size == getattr(module, "head_dim", None)
    if not by_head or not keeps_bits("rotary", sizes):
        return False
    # Compare q, k and v with the norms in place, and with the norms deferred to the operator.
    try:
        apart = _attended(module)
        vars(module).update(q_norm=_as_it_is, k_norm=_as_it_is, deferred_norms=(q_norm, k_norm))
        same = len(apart) == 3 and all(map(torch.equal, apart, _attended(module)))
    except Exception:  # another attention module may raise anything
        same = False
    if not same:
        for name in ("q_norm", "k_norm", "deferred_norms"):
            vars(module).pop(name, None)
    return same


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _attended(module: Any) -> list[Tensor]:
    """Return q, k and v that the module's code passes to its attention function, on stand-ins."""
    weight, size, tokens = module.q_proj.weight, module.head_dim, 5
    device, dtype = weight.device, weight.dtype
    stripped: Any = copy.copy(module)
    stripped.forward = MethodType(module.forward.__func__, stripped)
    for seed, name in enumerate(("q_proj", "k_proj", "v_proj"), 41):
        rows = len(getattr(module, name).weight)
        projected = probe(1, tokens, rows, seed=seed, device=str(device)).to(dtype)
        vars(stripped)[name] = lambda _, projected=projected: projected
    vars(stripped)["o_proj"] = _as_it_is
    angles = probe(2, 1, tokens, size, seed=44, device=str(device)).to(dtype)
    found: list[Tensor] = []

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        found.extend((q, k, v))
        return q.transpose(1, 2), None

    with _attention_by(module, attend):
        stripped.forward(
            hidden_states=probe(1, tokens, size, seed=45, device=str(device)).to(dtype),
            position_embeddings=tuple(angles),
            attention_mask=None,
        )
    return found


@contextmanager
def _attention_by(module: Any, function: Callable[..., Any]) -> Iterator[None]:
    name = module.config._attn_implementation
    own = ALL_ATTENTION_FUNCTIONS[name]
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = own


# The test that the fused operators have the bits of the operators that they replace.


@dataclass(frozen=True, slots=True)
class Sizes:
    """The properties on which the bits of a norm depend."""

    size: int
    kind: NormKind
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, norm: AlignedRMSNorm) -> Sizes:
        """Return the sizes of a norm with a weight."""
        weight = norm.weight
        assert weight is not None
        return cls(len(weight), norm.kind, weight.dtype, str(weight.device))

    def probe(self, *shape: int, seed: int) -> Tensor:
        """Return probe numbers [..., size]."""
        return probe(*shape, self.size, seed=seed, device=self.device).to(self.dtype)


def _keeps_bits(operators: Operators, what: str, sizes: Sizes) -> bool:
    """Return whether a norm fused with its "sum" or its "rotary" keeps its bits, for any rows."""
    pairs = _of_sum(operators, sizes) if what == "sum" else _of_rotary(operators, sizes)
    same = all(torch.equal(a, b) for got, want in pairs for a, b in zip(got, want, strict=True))
    if not same:
        logger.warning("norms of %d and their %s stay apart: they differ here", sizes.size, what)
    return same


Results = Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]
"""Pairs of the fused operator's results and the separate operators' results."""


def _scale(sizes: Sizes, seed: int) -> Tensor:
    """Return a weight with its offset added, as `AlignedRMSNorm.scale` does."""
    weight = sizes.probe(seed=seed)
    return sizes.kind.offset + weight.float() if sizes.kind.offset else weight


def _of_sum(operators: Operators, sizes: Sizes) -> Results:
    x, residual = sizes.probe(2, max(ROW_COUNTS), seed=31)
    settings = _scale(sizes, 32), sizes.kind.eps, sizes.kind.round_last
    for count in ROW_COUNTS:
        given = x[:count], residual[:count], *settings
        yield operators.add_rms_norm(*given), Operators.add_rms_norm(operators, *given)


def _of_rotary(operators: Operators, sizes: Sizes) -> Results:
    """Yield the results for queries and keys that are views of one joint product."""
    heads, kv_heads = 3, 2
    both = sizes.probe(1, max(ROW_COUNTS), heads + kv_heads, seed=33).transpose(1, 2)
    angles = sizes.probe(2, 1, max(ROW_COUNTS), seed=34)
    scales, kind = (_scale(sizes, 35), _scale(sizes, 36)), sizes.kind
    for count in ROW_COUNTS:
        q, k = both[:, :, :count].split((heads, kv_heads), dim=1)
        given = q, k, scales, *angles[:, :, :count], kind.eps, kind.round_last
        yield operators.norm_rotary(*given), Operators.norm_rotary(operators, *given)


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linears of a module that read the same tensor. If they are called with different
tensors, the results are still right, but each takes a product of its own."""


class JointLinear:
    """A joint forward pass of several linears, whose weights become parts of one tensor.

    `linears`: weight [N_i, K] each, and all of them or none with a bias [N_i].
    """

    def __init__(self, linears: Sequence[Any], operators: Operators):
        self.linears, self.operators = linears, operators
        self.sizes = [len(linear.weight) for linear in linears]
        self.weight = _joined([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else _joined(biases)
        self._x: Tensor | None = None
        self._parts: list[Tensor | None] = [None] * len(linears)
        for number, linear in enumerate(linears):
            linear.forward = partial(self._forward, number)

    def _forward(self, number: int, x: Tensor) -> Tensor:
        """Compute [..., K] -> [..., N_i]; the first linear that is called computes all of them."""
        # A new input, or a second call of the same linear: compute the joint product again.
        if x is not self._x or self._parts[number] is None:
            self._x = x
            operators = operators_of(self.linears[0], self.operators)
            product = operators.linear(x, self.weight, self.bias)
            self._parts = list(product.split(self.sizes, dim=-1))
        # Every part is returned once. After the last one the input is no longer referenced.
        part, self._parts[number] = self._parts[number], None
        if all(part is None for part in self._parts):
            self._x = None
        assert part is not None
        return part

    def require_joint(self) -> None:
        """Raise ContractError if a linear's weight is no longer a part of the joint weight."""
        for joint, parts in (
            (self.weight, [linear.weight for linear in self.linears]),
            (self.bias, [linear.bias for linear in self.linears]),
        ):
            start = 0 if joint is None else joint.data_ptr()
            for part in parts if joint is not None else ():
                if part.data_ptr() != start:
                    raise ContractError(
                        f"shape={tuple(part.shape)}: a loader put a weight into memory of its own, and "
                        "the engine would go on with the old one. Restart the engine, and report this."
                    )
                start += part.numel() * part.element_size()


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return one tensor along the first axis, and make the parameters views of it."""
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joint


def join_linears(
    model: nn.Module, operators: Operators, may_join: Callable[[nn.Module], bool]
) -> list[JointLinear]:
    """Join siblings of `model` in place, where the joint product has the bits of the separate products.

    `may_join`: whether a linear computes `Operators.linear` of its input and nothing else.
    """
    proven: dict[tuple[Any, ...], bool] = {}
    joint = []
    for linears in _siblings(model, may_join):
        key = tuple(map(_kind, linears))
        if key not in proven:
            proven[key] = _join_keeps_bits(operators, linears)
            if not proven[key]:
                logger.warning("linears of sizes %s stay apart: together they have other bits", key)
        if proven[key]:
            joint.append(JointLinear(linears, operators))
    return joint


def _siblings(model: nn.Module, may_join: Callable[[nn.Module], bool]) -> Iterator[list[Any]]:
    for module in model.modules():
        for names in SIBLINGS:
            linears: list[Any] = [module._modules.get(name) for name in names]
            if all(linear is not None and may_join(linear) for linear in linears):
                *_, dtypes, inner, has_bias = zip(*map(_kind, linears), strict=True)
                if len(set(dtypes)) == len(set(inner)) == len(set(has_bias)) == 1:
                    yield linears


def _kind(linear: Any) -> tuple[int, torch.dtype, int, bool]:
    rows, inner = linear.weight.shape
    return rows, linear.weight.dtype, inner, linear.bias is not None


def _join_keeps_bits(operators: Operators, linears: Sequence[Any]) -> bool:
    """Return whether a joint product has the bits of the separate ones, for any number of rows.

    On a CPU, which sums bfloat16 in float32, float32 is tested too: rounding hides most of a sum.
    """
    device, dtype = linears[0].weight.device, linears[0].weight.dtype
    dtypes = {dtype} | ({torch.float32} if device.type == "cpu" else set())
    ways = [operators]
    if all(size % FP8_BLOCK == 0 for linear in linears for size in linear.weight.shape):
        ways += {operators.of_rounded} - {operators}
    return all(_keeps_bits_in(each, way, linears) for way in ways for each in dtypes)


def _keeps_bits_in(dtype: torch.dtype, operators: Operators, linears: Sequence[Any]) -> bool:
    device, inner = str(linears[0].weight.device), linears[0].weight.shape[1]
    sizes, has_bias = [len(linear.weight) for linear in linears], linears[0].bias is not None
    weight = probe(sum(sizes), inner, seed=21, device=device).div_(inner**0.5).to(dtype)
    bias = probe(sum(sizes), seed=22, device=device).to(dtype) if has_bias else None
    weights = weight.split(sizes)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    rows = probe(max(ROW_COUNTS), inner, seed=23, device=device).to(dtype)
    return all(
        torch.equal(together, operators.linear(rows[:count], *own))
        for count in ROW_COUNTS
        for together, own in zip(
            operators.linear(rows[:count], weight, bias).split(sizes, dim=-1),
            zip(weights, biases, strict=True),
            strict=True,
        )
    )
