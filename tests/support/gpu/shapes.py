"""The sizes of the Qwen3 models at which operators are measured and checked (from their config.json)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model's sizes, in the names of its config.json."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    intermediate: int
    """Of the dense MLP, or of one expert where there are experts."""
    vocab: int = 151936
    experts: int = 0
    experts_per_token: int = 0

    def linears(self):
        """Distinct linears as (out features N, in features K). Example: {"o": (2560, 4096)}"""
        attention = self.heads * self.head_dim
        shapes = {
            "q": (attention, self.hidden),
            "kv": (self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, attention),
        }
        if self.experts:
            shapes["router"] = (self.experts, self.hidden)
        else:
            shapes["gate_up"] = (self.intermediate, self.hidden)
            shapes["down"] = (self.hidden, self.intermediate)
        return {**shapes, "lm_head": (self.vocab, self.hidden)}

    def joint_linears(self):
        """The linears of a dense model as the engines join them, and the head: (N, K) by name."""
        attention, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (attention + 2 * kv, self.hidden),
            "o": (self.hidden, attention),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "lm_head": (self.vocab, self.hidden),
        }

    def expert_linears(self):
        """Grouped linears as (experts E, N, K); empty for a dense model."""
        if not self.experts:
            return {}
        return {
            "expert_gate_up": (self.experts, 2 * self.intermediate, self.hidden),
            "expert_down": (self.experts, self.hidden, self.intermediate),
        }


QWEN3_0_6B = ModelShape(
    name="Qwen3-0.6B", hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072
)
QWEN3_4B = ModelShape(
    name="Qwen3-4B", hidden=2560, layers=36, heads=32, kv_heads=8, intermediate=9728
)
QWEN3_8B = ModelShape(
    name="Qwen3-8B", hidden=4096, layers=36, heads=32, kv_heads=8, intermediate=12288
)
QWEN3_30B_A3B = ModelShape(
    name="Qwen3-30B-A3B",
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    intermediate=768,
    experts=128,
    experts_per_token=8,
)

TINY = ModelShape(
    name="tiny", hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=137
)
"""Sizes of rehearsals."""

MODELS = {shape.name: shape for shape in (QWEN3_0_6B, QWEN3_4B, QWEN3_8B, QWEN3_30B_A3B)}
