"""The images of requests in an engine's decoder, by the trainer's tower.

SGLang's transformers backend runs the whole multimodal model on every prefill, switches its prefix
cache and chunked prefill off, and makes the pixels of a prompt's text by itself. Here an engine
serves the text part, as without images. A request brings its images, already placed among its tokens
(`custom_params={"images": ...}`), and before every pass the trainer's own code
(onpolicy/models/vision/seeing.py) computes the rows of those images that the pass reaches. The tower
is the decoder's child, so weights reach it as they reach any layer. The prefix cache knows tokens alone,
which other images have too, so a request's `extra_key` gets the digest of its images: what shares all
of them shares their prefixes.

The positions and the rows are made on the host, so no CUDA graph can hold a pass. Where an image's
tokens see each other (Gemma-3), a chunk of a prefill may not end within one.

Source: MultiModalMixin and CausalMixin, sglang/srt/models/transformers.py; ForwardBatch.init_new,
sglang/srt/model_executor/forward_batch_info.py. Can go when the backend takes embeddings of its caller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError
from onpolicy.images.pixels import PixelReader
from onpolicy.images.placed import PlacedImage, digest_of, read_images
from onpolicy.models.empty import give_memory
from onpolicy.models.vision.image_attention import BlockAttention
from onpolicy.models.vision.seeing import SequencePart, Sight, add_sight, sight_of
from onpolicy.ops import Operators, ScoreRule
from sglang_patches import registry
from sglang_patches.engine_graphs import require_no_graphs
from sglang_patches.engine_ranks import num_ranks

MAKE_TARGET = "sglang.srt.models.transformers.CausalMixin.__init__"
BATCH_TARGET = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
TAKE_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"


def install(operators: Operators, contract: NumericsContract) -> None:
    """Hook SGLang for a contract with images, and refuse images under any other."""
    registry.hook(TAKE_TARGET, ImageTaker(contract), "after")
    if not contract.images:
        return

    def after_init(result: Any, model: Any, *_: Any, **__: Any) -> Any:
        give_sight(model, operators, getattr(torch, contract.dtype))
        return result

    def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
        require_no_graphs(runner, "the positions and rows of images, which are")
        embed_images(runner, operators)
        return result

    registry.hook(MAKE_TARGET, after_init, "after")
    registry.hook(BATCH_TARGET, _with_images, "after")
    registry.hook(LOAD_TARGET, after_load, "after")


class ImageTaker:
    """A hook that checks the images of each request, in the process that all requests pass through.

    It keeps the prefixes of other images apart by a digest.
    """

    def __init__(self, contract: NumericsContract):
        self._sees = bool(contract.images)
        self._pixels: PixelReader | None = None

    def __call__(self, tokenized: Any, manager: Any, *_: Any, **__: Any) -> Any:
        """Raise ValueError, which is the answer, for images that this engine cannot compute as the
        caller's trainer does."""
        if not (images := images_of(tokenized.sampling_params.custom_params)):
            return tokenized
        if not self._sees:
            raise ValueError("images: this server reads text alone. Start it with --images.")
        if self._pixels is None:
            self._pixels = PixelReader(manager.server_args.model_path)
        token = self._pixels.family.image_token
        for image in images:
            self._pixels.checked(image)
            if {*tokenized.input_ids[image.start : image.end]} != {token}:
                raise ValueError(
                    f"images: {image} does not stand for tokens {token} of the prompt."
                )
        tokenized.extra_key = (tokenized.extra_key or "") + digest_of(images)
        return tokenized


def images_of(params: Any) -> tuple[PlacedImage, ...]:
    """Return the images in a request's own parameters. Raise ValueError for what is none."""
    return read_images((params or {}).get("images", "[]"))


def give_sight(model: Any, operators: Operators, dtype: torch.dtype) -> None:
    """Give a model of SGLang's backend the tower of its checkpoint, for weights to be loaded into."""
    from sglang.srt.runtime_context import get_model

    if (degree := num_ranks()) > 1:
        raise ContractError(
            f"tp_size={degree}: a vision tower is not sharded over ranks. Start the engine with "
            "--tp-size 1, or leave --images out."
        )
    add_sight(model.model, get_model().model_path, operators)
    tower, device = model.model.tower, model.lm_head.weight.device
    buffers = dict(tower.named_buffers())
    give_memory(tower.to(dtype), device, buffers)


def _with_images(result: Any, cls: Any, batch: Any, *_: Any, **__: Any) -> Any:
    """Have a pass know the images of its requests."""
    for req in batch.reqs:
        if not hasattr(req, "images"):  # read once for all passes
            req.images = images_of(req.sampling_params.custom_params)
    # A runner copies the pass, and hands on what its requests are sampled with.
    result.sampling_info.images = [req.images for req in batch.reqs]
    return result


def embed_images(runner: Any, operators: Operators) -> None:
    """Have a loaded model's decoder get the embeddings of tokens and images before every pass."""
    decoder = runner.model.model
    sight = sight_of(decoder)
    assert sight is not None

    def before(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        batch, tokens = kwargs["forward_batch"], kwargs["input_ids"][0]
        parts = parts_of(batch)
        embedded = sight.embed(tokens[: sum(part.length for part in parts)], parts)
        batch.image_attention = image_attention(runner, operators, batch, sight)
        return args, {**kwargs, "input_ids": None, "inputs_embeds": embedded}

    decoder.register_forward_pre_hook(before, with_kwargs=True)


def parts_of(batch: Any) -> list[SequencePart]:
    """Return the part of each request that a pass of SGLang's computes."""
    if batch.forward_mode.is_decode_or_idle():
        spans = [(n - 1, 1) for n in batch.seq_lens.tolist()]
    else:
        spans = [*zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)]
    images = batch.sampling_info.images
    return [SequencePart(*span, seen) for span, seen in zip(spans, images, strict=True)]


def image_attention(
    runner: Any, operators: Operators, batch: Any, sight: Sight
) -> ImageAttention | None:
    """Return the attention of a pass's images whose tokens see each other; None without any."""
    slots = runner.req_to_token_pool.req_to_token

    def key_rows(part: int, first: int, end: int) -> Tensor:
        rows: Tensor = slots[batch.req_pool_indices[part], first:end]
        return rows.long().cpu()

    found = sight.attention(key_rows)
    return None if found is None else ImageAttention(runner, operators, found)


class ImageAttention:
    """The attention of images within an engine's pass, over the pages of its cache."""

    def __init__(self, runner: Any, operators: Operators, blocks: BlockAttention):
        self._pool, self._operators, self._blocks = runner.token_to_kv_pool, operators, blocks

    def correct(self, layer: Any, q: Tensor, out: Tensor, scores: ScoreRule) -> Tensor:
        """Return a layer's causal attention, [T, H * D_v], with the rows of images computed anew.

        q: [T, H * D]; the keys of the pass are in the cache.
        """
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        keys = self._pool.get_key_buffer(layer.layer_id)[:, :kv_heads, : layer.qk_head_dim]
        values = self._pool.get_value_buffer(layer.layer_id)[:, :kv_heads, : layer.v_head_dim]
        q, causal = (x.unflatten(-1, (heads, -1)) for x in (q, out))
        return self._blocks.correct(self._operators, causal, q, keys, values, scores).flatten(1)
