"""Records the modules of SGLang's own models, under the names of Hugging Face's, operator by operator.

SGLang fuses projections that share an input, and a norm with the addition before it. What it fused is
taken apart by the sizes that its layers know, so that the trainer's rows have counterparts.
Source: sglang/srt/models/qwen3.py and its kin; sglang/srt/layers/linear.py,
sglang/srt/layers/layernorm.py, sglang/srt/layers/activation.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onpolicy.taps.recorder import HEAD, Recorder
from onpolicy.taps.scope import Scope

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""SGLang's name of layers that it computes at once, and Hugging Face's."""


def watch(model: Any, recorder: Recorder) -> None:
    """Record `model` from now on; a module of an unknown kind is left out."""
    for name, module in model.named_modules():
        if (known := name.removeprefix("model.")) != name:
            _watch(known, module, recorder)
    _watch_head(model, recorder)


def _watch(name: str, module: Any, recorder: Recorder) -> None:
    kinds = {base.__name__ for base in type(module).__mro__}
    parent, _, own = name.rpartition(".")
    if own == "self_attn":
        module.register_forward_pre_hook(lambda *_: recorder.enter(Scope(module=name)))
        module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)
    if "VocabParallelEmbedding" in kinds:
        _on_output(module, recorder, lambda args, out: ("embed_tokens", "embedding", (), (out,)))
    elif own in FUSED:
        _watch_fused(parent, own, module, recorder)
    elif "LinearBase" in kinds:
        _on_output(module, recorder, lambda args, out: (name, "linear", args[:1], (out[0],)))
    elif "RMSNorm" in kinds:
        _on_output(module, recorder, lambda args, out: _norm(name, args, out))
    elif "SiluAndMul" in kinds:
        _on_output(
            module, recorder, lambda args, out: (parent, "gated", args[0].chunk(2, -1), (out,))
        )
    elif "RotaryEmbedding" in kinds:
        _watch_rotary(module, recorder)
    elif "RadixAttention" in kinds:
        _on_output(module, recorder, lambda args, out: (parent, "attention", args[:1], (out,)))


def _norm(name: str, args: Any, out: Any) -> Any:
    """A norm that adds before it normalises returns the sum, too: that is what it normalised."""
    normed, given = out if isinstance(out, tuple) else (out, args[0])
    return name, "rms_norm", (given,), (normed,)


def _watch_fused(parent: str, own: str, module: Any, recorder: Recorder) -> None:
    sizes = list(module.output_partition_sizes)
    names = [f"{parent}.{part}" for part in FUSED[own]]

    def record(_: nn.Module, args: Any, out: Any) -> None:
        if recorder.is_open:
            for name, part in zip(names, out[0].split(sizes, dim=-1), strict=True):
                recorder.add(name, "linear", args[:1], (part,))

    module.register_forward_hook(record)


def _on_output(module: nn.Module, recorder: Recorder, describe: Any) -> None:
    """Record what `describe(arguments, output)` says of each pass.

    Arguments are looked at before, too: a kernel may write its result over them.
    """
    before: list[Any] = []

    def keep(_: nn.Module, args: Any) -> None:
        if recorder.is_open:
            before.append(tuple(a.clone() if isinstance(a, Tensor) else a for a in args))

    def record(_: nn.Module, args: Any, out: Any) -> None:
        if before:
            recorder.add(*describe(before.pop(), out))

    module.register_forward_pre_hook(keep)
    module.register_forward_hook(record)


def _watch_rotary(module: Any, recorder: Recorder) -> None:
    """One module serves all layers, so the running layer's attention is asked for its name."""
    _on_output(module, recorder, lambda args, out: (recorder.module, "rotary", args[1:3], out))


def _watch_head(model: Any, recorder: Recorder) -> None:
    """The logits processor takes the rows that need logits itself, and projects them."""
    processor = model.logits_processor
    compute = processor._compute_lm_head

    def watched(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = compute(hidden, *args, **kwargs)
        if recorder.is_open:
            size = args[0].org_vocab_size  # SGLang pads the vocabulary
            recorder.add(HEAD, "linear", (hidden,), (logits[:, :size],))
        return logits

    processor._compute_lm_head = watched
