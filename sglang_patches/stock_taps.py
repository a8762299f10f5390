"""Records the modules of SGLang's own models, under the names of Hugging Face's, operator by operator.

SGLang fuses projections that share an input, and a norm with the addition before it. What it fused is
taken apart by the sizes that its layers know, so that the trainer's rows have counterparts.
Source: sglang/srt/models/qwen3.py and its kin; sglang/srt/layers/linear.py,
sglang/srt/layers/layernorm.py, sglang/srt/layers/activation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from onpolicy.explain.taps.recorder import HEAD, Recorder
from onpolicy.explain.taps.scope import Scope
from sglang_patches.tensor_parallel import summed

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""SGLang's name of layers that it computes at once, and Hugging Face's."""

MIXTRAL = "block_sparse_moe"
"""SGLang's name of what transformers 5 calls `mlp` there, too."""

Record = tuple[str, str, Sequence[Tensor], Sequence[Tensor]]
"""What `Recorder.add` is given of a site."""

Describe = Callable[[Any, Any], list[Record]]
"""(arguments, output) of a pass of a module -> what is recorded of it."""


def watch(model: Any, recorder: Recorder, blocks: int) -> None:
    """Record `model` from now on; a module of an unknown kind is left out.

    blocks: those of the trainer's sums, by which it names the linears that make them.
    """
    for name, module in model.named_modules():
        if (known := name.removeprefix("model.")) != name:
            _watch(known.replace(MIXTRAL, "mlp"), module, recorder, blocks)
    _watch_head(model, recorder)


def _watch(name: str, module: Any, recorder: Recorder, blocks: int) -> None:
    parent, _, own = name.rpartition(".")
    if own == "self_attn":
        recorder.scoped(module, lambda *_: Scope(module=name))
    kinds = {base.__name__ for base in type(module).__mro__}
    shares_sum = blocks > 1 and "RowParallelLinear" in kinds
    linear = "row_parallel_linear" if shares_sum else "linear"
    # One rotary module serves all layers, so the running layer's attention is asked for its name.
    by_kind: dict[str, Describe] = {
        "VocabParallelEmbedding": lambda args, out: [("embed_tokens", "embedding", (), (out,))],
        "LinearBase": lambda args, out: _linear(name, linear, module, args, out[0]),
        "RMSNorm": lambda args, out: [_norm(name, args, out)],
        "SiluAndMul": lambda args, out: [(parent, "gated", args[0].chunk(2, -1), (out,))],
        "RotaryEmbedding": lambda args, out: [(recorder.module, "rotary", args[1:3], out)],
        "RadixAttention": lambda args, out: [(parent, "attention", args[:1], (out,))],
    }
    for describe in (describe for kind, describe in by_kind.items() if kind in kinds):
        _on_output(module, recorder, describe)


def _linear(name: str, operator: str, module: Any, args: Any, out: Tensor) -> list[Record]:
    parent, _, own = name.rpartition(".")
    if not getattr(
        module, "reduce_results", True
    ):  # SGLang adds ranks' parts up later, between modules
        out = summed(out)
    if own not in FUSED:
        return [(name, operator, args[:1], (out,))]
    parts = zip(FUSED[own], out.split(list(module.output_partition_sizes), -1), strict=True)
    return [(f"{parent}.{site}", "linear", args[:1], (part,)) for site, part in parts]


def _norm(name: str, args: Any, out: Any) -> Record:
    """A norm that adds before it normalises returns the sum, too: that is what it normalised."""
    normed, given = out if isinstance(out, tuple) else (out, args[0])
    return name, "rms_norm", (given,), (normed,)


def _on_output(module: nn.Module, recorder: Recorder, describe: Describe) -> None:
    """Record what is described of each pass.

    Arguments are looked at before, too: a kernel may write its result over them.
    """
    before: list[Any] = []

    def keep(_: nn.Module, args: Any) -> None:
        if recorder.is_open:
            before.append(tuple(a.clone() if isinstance(a, Tensor) else a for a in args))

    def record(_: nn.Module, args: Any, out: Any) -> None:
        if before:
            for site in describe(before.pop(), out):
                recorder.add(*site)

    module.register_forward_pre_hook(keep)
    module.register_forward_hook(record)


def _watch_head(model: Any, recorder: Recorder) -> None:
    """The logits processor takes the rows that need logits itself, and projects them."""
    processor = model.logits_processor
    compute = processor._compute_lm_head

    def watched(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = compute(hidden, *args, **kwargs)
        size = args[0].org_vocab_size  # SGLang pads the vocabulary
        recorder.add(HEAD, "linear", (hidden,), (logits[:, :size],))
        return logits

    processor._compute_lm_head = watched
