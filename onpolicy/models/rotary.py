"""The usual rotary embedding by the operators, in any Hugging Face model that uses it.

An attention module calls a rotary function of its own file. The function is recognised by what it
computes: on a probe it gives exactly the bits of transformers' usual formula. The module then runs
its own code, with that function's name bound to the operator. Only one instance changes: its class,
its file, and other models in this process stay as they are. Other rotary embeddings (interleaved,
of several axes) stay, in both engines, and so does a call that the operator does not support: one
that rotates part of each head, or has another order of axes.

The exception is the product of complex numbers of DeepSeek-V2 and Llama-4. Whether its kernels fuse
a product with a sum depends on where an element lies, so it is written out in real numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, update_wrapper
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.models.output_gate import names_of_gate
from onpolicy.ops.base import Operators, rotate
from onpolicy.ops.checks.fixed_numbers import probe

Rotary = Callable[..., tuple[Tensor, Tensor]]


def rotate_by_operators(module: nn.Module, operators: Operators) -> None:
    """Make `module` call `Operators.rotary`, if its code calls the usual rotary embedding."""
    forward = type(module).forward
    if "forward" in vars(module) or not isinstance(forward, FunctionType):
        return
    called: dict[str, Any] = {
        name: forward.__globals__.get(name) for name in forward.__code__.co_names
    }
    own = {name: _by_operators(f, module) for name, f in called.items() if is_usual_rotary(f)}
    own |= names_of_gate(forward, module)
    for ours in (rotate_pairs, rotate_pairs_of_tokens):
        own |= {name: ours for name, f in called.items() if is_complex_rotary(f, ours)}
    if own:
        module.operators = operators  # type: ignore[assignment]
        module.forward = MethodType(_rebound(forward, own), module)


def is_usual_rotary(function: Any) -> bool:
    """Return whether it is a function of (q, k, cos, sin) with the bits of transformers' usual one."""
    return _takes(function, "q", "k", "cos", "sin") and _has_usual_bits(function)


def is_complex_rotary(function: Any, ours: Rotary) -> bool:
    """Return whether it is a function of (xq, xk, freqs_cis) that computes the same as `ours`."""
    return _takes(function, "xq", "xk", "freqs_cis") and _turns_pairs(function, ours)


def _takes(function: Any, *names: str) -> bool:
    if isinstance(function, nn.Module):  # the package `kernels` wraps functions in modules
        function = function.forward
    if not isinstance(function, (FunctionType, MethodType)):
        return False
    return tuple(inspect.signature(function).parameters)[: len(names)] == names


def rotate_pairs(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `x * freqs_cis` in float32, where two neighbours in a head are one complex number.

    xq: [B, H, T, D], xk: [B, H_kv, T, D], freqs_cis: complex64 [B, T, D / 2] -> xq and xk, rotated.
    Every product and sum is rounded.
    Source: transformers' modeling_deepseek_v2.apply_rotary_emb.
    """
    cos, sin = freqs_cis[:, None].real, freqs_cis[:, None].imag

    def rotated(x: Tensor) -> Tensor:
        real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = real * cos - imaginary * sin, real * sin + imaginary * cos
        return torch.stack(turned, -1).flatten(-2).type_as(x)

    return rotated(xq), rotated(xk)


def rotate_pairs_of_tokens(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `rotate_pairs` to xq: [B, T, H, D] and xk: [B, T, H_kv, D], as Llama-4 calls it."""
    q, k = rotate_pairs(xq.transpose(1, 2), xk.transpose(1, 2), freqs_cis)
    return q.transpose(1, 2), k.transpose(1, 2)


@cache
def _turns_pairs(function: Rotary, ours: Rotary) -> bool:
    heads_first = ours is rotate_pairs
    q, k = (
        probe(2, *((heads, 5) if heads_first else (5, heads)), 8, seed=heads) for heads in (4, 2)
    )
    turns = torch.complex(*(probe(2, 5, 4, seed=seed) for seed in (5, 6)))
    try:
        got = function(q, k, turns)
    except Exception:  # the function may take other shapes
        return False
    return all(map(torch.allclose, got, ours(q, k, turns)))


@cache
def _has_usual_bits(function: Rotary) -> bool:
    for dtype in (torch.float32, torch.bfloat16):
        q, k = (probe(2, heads, 5, 8, seed=heads).to(dtype) for heads in (4, 2))
        cos, sin = (probe(2, 5, 8, seed=seed).to(dtype) for seed in (5, 6))
        try:
            got = function(q, k, cos, sin)
        except Exception:  # the function may take other shapes
            return False
        want = rotate(q, cos, sin), rotate(k, cos, sin)
        if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            return False
    return True


def _by_operators(own: Rotary, module: Any) -> Rotary:
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
        # The operator takes one angle per token and dimension, and nothing else.
        fits = cos.dim() == 3 and cos.shape[1:] == q.shape[2:] and cos.dtype == q.dtype
        norms = vars(module).get("deferred_norms")  # see models/fused_layers.py
        if rest or named or not fits:
            q, k = (q, k) if norms is None else (norms[0](q), norms[1](k))
            return own(q, k, cos, sin, *rest, **named)
        if norms is None:
            return module.operators.rotary(q, k, cos, sin)
        kind, scales = norms[0].kind, (norms[0].scale, norms[1].scale)
        return module.operators.norm_rotary(q, k, scales, cos, sin, kind.eps, kind.round_last)

    return rotary


def _rebound(function: FunctionType, names: dict[str, Rotary]) -> FunctionType:
    """Return a function with the same code, in which some global names are bound to other objects."""
    scope = {**function.__globals__, **names}
    rebound = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(rebound, function)
    return rebound
