"""Gives the engine the trainer's rotary frequencies, to the last bit.

SGLang builds the Hugging Face model on the device it serves from, so on a GPU the inverse frequencies
are powers computed by that GPU. The trainer's are computed by a CPU, which rounds some of them
otherwise. Loaded buffers are therefore overwritten with those of a model built on the CPU.
Source: DefaultModelLoader.load_model, sglang/srt/model_loader/loader.py. Can go when buffers are built
on the CPU there, or loaded with the weights.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from onpolicy.errors import ContractError


def use_cpu_buffers(model: PreTrainedModel, trainers: PreTrainedModel) -> None:
    """Overwrite the buffers of a decoder, a Hugging Face base model, with those of the trainer's."""
    held = dict(model.named_buffers())
    for name, buffer in trainers.base_model.named_buffers():
        if name not in held or held[name].dtype != buffer.dtype:
            raise ContractError(
                f"buffer={name}: the engine's model does not hold it as {buffer.dtype}, so it is not "
                "the model that the trainer runs. Install a supported SGLang."
            )
        held[name].copy_(buffer)
