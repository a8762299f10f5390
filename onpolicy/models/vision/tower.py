"""The vision tower of a published model, beside the decoder that reads its rows.

Both engines run transformers' own modules of the whole model on one image at a time, so a tower's
sums do not depend on other images. Inside, linears, norms and activations are the aligned operators,
as in a decoder, a convolution whose kernels do not overlap is a linear over patches, and attention is
`whole_attention`.

The tower is a child of the decoder, `model.tower`: it is trained, sharded, pushed and saved with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.images.pixels import Pixels
from onpolicy.models.align import AlignedActivation, align_modules
from onpolicy.models.empty import initialize_buffers, parameters_without_memory
from onpolicy.models.vision.image_attention import VISION_ATTENTION
from onpolicy.ops.base import Operators


class ImageRows(NamedTuple):
    """The rows of an image, which stand in the place of its tokens' embeddings."""

    embeddings: Tensor
    """[R, H]"""

    added: Sequence[Tensor] = ()
    """[R, H] for each of the first layers, which adds it to its output (DeepStack)."""


class QwenTower(nn.Module):
    """Qwen3-VL's tower. Source: transformers' Qwen3VLModel.get_image_features."""

    def __init__(self, config: Any):
        super().__init__()
        self.visual = _part(config.vision_config)

    def forward(self, pixels: Pixels) -> ImageRows:
        """Compute the rows of one image."""
        weight = self.visual.pos_embed.weight
        grid = torch.tensor([pixels.grid], device=weight.device)
        found = self.visual(pixels.values.to(weight), grid_thw=grid)
        return ImageRows(found.pooler_output, tuple(found.deepstack_features))


class GemmaTower(nn.Module):
    """Gemma-3's tower and projector. Source: transformers' Gemma3Model.get_image_features."""

    def __init__(self, config: Any):
        super().__init__()
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        self.vision_tower = _part(config.vision_config)
        self.multi_modal_projector = Gemma3MultiModalProjector(config)

    def forward(self, pixels: Pixels) -> ImageRows:
        """Compute the rows of one image."""
        weight = self.multi_modal_projector.mm_input_projection_weight
        seen = self.vision_tower(pixel_values=pixels.values.to(weight)).last_hidden_state
        return ImageRows(self.multi_modal_projector(seen)[0])


_TOWERS: dict[str, type[nn.Module]] = {"gemma3": GemmaTower, "qwen3_vl": QwenTower}


def make_tower(directory: str | Path, operators: Operators) -> nn.Module:
    """Return `empty_tower` with aligned modules."""
    tower = empty_tower(directory)
    _align(tower, operators)
    return tower.eval()


def empty_tower(directory: str | Path) -> nn.Module:
    """Return the tower of a checkpoint, with parameters on the meta device and buffers in place.

    Raise ConfigError if transformers cannot build it.
    """
    config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
    try:
        with parameters_without_memory():
            tower = _TOWERS[config.model_type](config)
        for part in tower.children():
            if isinstance(part, PreTrainedModel):
                initialize_buffers(part)
    except Exception as error:  # a model's own code may raise anything
        raise ConfigError(
            f"{directory}: --images: transformers cannot build its vision tower ({in_one_line(error)}). "
            "Download the checkpoint again, or leave --images out."
        ) from error
    return tower


def _part(config: PretrainedConfig) -> Any:
    return AutoModel.from_config(config, attn_implementation=VISION_ATTENTION, dtype=torch.float32)


def _align(tower: nn.Module, operators: Operators) -> None:
    align_modules(tower, operators)
    for module in list(tower.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (nn.Conv2d, nn.Conv3d)):
                setattr(module, name, PatchLinear(child, operators))
            elif isinstance(child, nn.GELU):
                setattr(module, name, AlignedActivation(child, operators))
            elif hasattr(child, "mm_input_projection_weight"):
                _multiply_by_operators(child, operators)
        if getattr(module, "is_causal", None) is False:
            module.operators = operators  # type: ignore[assignment]


class PatchLinear(nn.Module):
    """A convolution whose kernels lie side by side, computed as a linear over its patches."""

    def __init__(self, conv: nn.Conv2d | nn.Conv3d, operators: Operators):
        super().__init__()
        is_padded = conv.padding != "valid" and any(conv.padding)
        if conv.kernel_size != conv.stride or is_padded:
            raise ValueError(f"{conv}: its kernels overlap, and only patches have an operator")
        self.weight, self.bias, self.operators = conv.weight, conv.bias, operators

    def forward(self, x: Tensor) -> Tensor:
        """Compute [N, C, *sizes] -> [N, E, *patches]."""
        sides = self.weight.shape[2:]
        cut = x
        for axis, side in reversed([*enumerate(sides, 2)]):
            cut = cut.unflatten(axis, (-1, side))
        grid, inner = range(2, cut.dim(), 2), range(3, cut.dim(), 2)
        patches = cut.permute(0, *grid, 1, *inner)
        rows = patches.reshape(-1, prod(self.weight.shape[1:]))
        out = self.operators.linear(rows, self.weight.flatten(1), self.bias)
        return out.view(*patches.shape[: 1 + len(grid)], -1).movedim(-1, 1)


def _multiply_by_operators(projector: Any, operators: Operators) -> None:
    projector.operators, projector.forward = operators, MethodType(_project, projector)


def _project(projector: Any, seen: Tensor) -> Tensor:
    """Compute Gemma3MultiModalProjector.forward: [1, patches, H_v] -> [1, R, H]."""
    side = projector.patches_per_image
    pooled = projector.avg_pool(seen.transpose(1, 2).unflatten(2, (side, side)))
    normed = projector.mm_soft_emb_norm(pooled.flatten(2).transpose(1, 2))
    weight = projector.mm_input_projection_weight.t().contiguous()
    out: Tensor = projector.operators.linear(normed.contiguous(), weight, None)
    return out
