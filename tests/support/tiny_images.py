"""The files of small checkpoints that see images, without weights, and small images."""

import io
import json

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.chat_tokenizers import byte_tokenizer
from tests.support.published import published

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Handles parts as Qwen3-VL's template does."""

GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>"
    "{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Handles parts as Gemma-3's template does."""

_QWEN = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_GEMMA = {
    "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
    "image_token_index": "<image_soft_token>",
}  # fmt: skip
_PROCESSORS = {
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2,
        "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    },
}  # fmt: skip


def write_image_checkpoint_files(directory, model_type):
    """Write the config.json, processor and tokenizer of a qwen3_vl or gemma3; returns the directory.

    An image of qwen3_vl has a row for each 8 x 8 pixels, 1 to 16 of them, and of gemma3 has 4.
    """
    directory.mkdir(parents=True, exist_ok=True)
    is_qwen = model_type == "qwen3_vl"
    tokenizer = byte_tokenizer(QWEN if is_qwen else GEMMA)
    named = _QWEN if is_qwen else _GEMMA
    turns = [] if is_qwen else ["<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer.add_tokens([*named.values(), *turns], special_tokens=True)
    if not is_qwen:
        tokenizer.bos_token, tokenizer.eos_token = "<bos>", "<end_of_turn>"
    tokenizer.save_pretrained(directory)
    raw = published("qwen3-vl-4b-instruct" if is_qwen else "gemma-3-4b-it")
    raw |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    raw["text_config"] |= {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    raw["text_config"]["eos_token_id"] = raw["eos_token_id"] = tokenizer.eos_token_id
    if not is_qwen:
        raw["vision_config"] |= {"image_size": 16, "patch_size": 4}
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[model_type]))
    return directory


def encoded_image(colour="red", size=(24, 16), kind="PNG"):
    """The bytes of an image of one colour, and a corner of another."""
    image = Image.new("RGB", size, colour)
    image.putpixel((0, 0), (1, 2, 3))
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def picture(seed=0, size=(24, 16)):
    """A PNG of noise."""
    pixels = np.random.RandomState(seed).randint(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_image_checkpoint(directory, model_type, dtype=torch.bfloat16, text=(), vision=()):
    """Write a whole small checkpoint of random weights, and return its directory.

    Weights are large enough for an image to change what follows it. text, vision: other fields of the
    parts' configurations.
    """
    file = write_image_checkpoint_files(directory, model_type) / "config.json"
    raw = json.loads(file.read_text())
    raw["text_config"] |= dict(text)
    raw["vision_config"] |= dict(vision)
    file.write_text(json.dumps(raw))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(directory)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed_tokens" not in name:
                nn.init.normal_(weight, std=0.6 * weight[0].numel() ** -0.5)
            elif "bias" in name:
                nn.init.normal_(weight, std=0.1)
    files = {file: (directory / file).read_bytes() for file in KEPT}
    model.to(dtype).save_pretrained(directory)
    for file, content in files.items():
        (directory / file).write_bytes(content)
    return directory


KEPT = ("config.json", "preprocessor_config.json")
