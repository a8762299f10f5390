"""Makes what this example needs: pictures of one to four shapes, and a small Qwen3-VL of random weights.

    python examples/shapes/make_inputs.py OUT_DIR

OUT_DIR/data.parquet, OUT_DIR/eval.parquet   a chat with a picture, and the number of its shapes
OUT_DIR/model/                               a real checkpoint with tokenizer, template and processor

A picture has 32 x 32 pixels: a grid of 8 x 8 patches, of which each 2 x 2 are a token. Does nothing if
OUT_DIR is complete.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow
from PIL import Image, ImageDraw
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from warm_start import is_complete, make_tokenizer

NUM_TRAIN, NUM_EVAL = 2048, 256
SIDE, RADIUS = 32, 3
QUESTION = "<image>How many shapes?"
CHARACTERS = "\n 1234?Haehimnopstuwyr"

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Writes messages and images as Qwen3-VL's own does."""

TURN, END = "<|im_start|>", "<|im_end|>"
SPECIAL = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}

TEXT = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
TEXT |= {"tie_word_embeddings": True, "initializer_range": 0.14}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "num_heads": 2, "patch_size": 4}
TOWER |= {"out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
TOWER |= {"initializer_range": 0.14}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
AXES |= {"mrope_section": [4, 2, 2]}
"""Sizes of a model of 0.09 million parameters."""


def picture(count: int, rng: random.Random) -> bytes:
    """Return a PNG of discs and squares that touch neither each other nor the border."""
    image = Image.new("RGB", (SIDE, SIDE))
    draw, centres = ImageDraw.Draw(image), list[tuple[int, int]]()
    while len(centres) < count:
        x, y = (rng.randint(RADIUS, SIDE - 1 - RADIUS) for _ in range(2))
        if all(max(abs(x - a), abs(y - b)) > 2 * RADIUS + 1 for a, b in centres):
            centres.append((x, y))
            colour = tuple(rng.randint(96, 255) for _ in range(3))
            shape = rng.choice([draw.ellipse, draw.rectangle])
            shape((x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def rows(rng: random.Random) -> list[dict[str, Any]]:
    """Return chats with pictures, and as many shapes in each as its label says."""
    counts = [rng.randint(1, 4) for _ in range(NUM_TRAIN + NUM_EVAL)]
    return [
        {
            "prompt": [{"role": "user", "content": QUESTION}],
            "images": [{"bytes": picture(count, rng), "path": f"{number}.png"}],
            "label": str(count),
        }
        for number, count in enumerate(counts)
    ]


def write_model(directory: Path) -> None:
    """Write a checkpoint in bfloat16: complete, or not there."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    tokenizer = make_tokenizer(CHARACTERS, TEMPLATE)
    tokenizer.add_tokens([TURN, END, *SPECIAL.values()], special_tokens=True)
    tokenizer.eos_token = END
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    made = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3VLConfig(
        text_config={**TEXT, **made, "rope_parameters": AXES},
        vision_config=TOWER,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    partial = directory.with_suffix(".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    Qwen2VLImageProcessor(patch_size=4, merge_size=2, size=size).save_pretrained(partial)
    partial.rename(directory)


def main(out: Path) -> None:
    if is_complete(out):
        return
    out.mkdir(parents=True, exist_ok=True)
    made = rows(random.Random(0))
    parquet.write_table(pyarrow.Table.from_pylist(made[:NUM_TRAIN]), out / "data.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(made[NUM_TRAIN:]), out / "eval.parquet")
    write_model(out / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
