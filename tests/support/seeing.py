<<<<<<< HEAD
"""Policies with a vision tower, and prompts with images for them."""

import torch

from onpolicy.images.pixels import PixelReader
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.ops.cpu import CpuOperators
from onpolicy.trajectory import PlacedImage

FAMILIES = ("qwen3_vl", "gemma3")


def seeing_policy(path, dtype=torch.float32, threads=1):
    """The policy of a checkpoint with its tower, its weights in `dtype`."""
    reader = CheckpointReader(path)
    policy = empty_policy(load_config(str(path)), CpuOperators(threads), tower_of=str(path))
    model = policy.causal_lm
    state = {name: tensor.to(dtype) for name, tensor in reader.tensors()}
    state |= {name: reader.read(name, ()).to(dtype) for name in reader.tower}
    missing = model.load_state_dict(state, strict=False, assign=True).missing_keys
    model.tie_weights()
    assert {*missing} <= {"lm_head.weight"} and not any(p.is_meta for p in model.parameters())
    return policy


def prompt_with(path, *images, text=(5, 6, 7), seed=0):
    """Tokens with these images among them, and their places."""
    read, generator = PixelReader(path), torch.Generator().manual_seed(seed)
    tokens, placed = [*text], []
    for data in images:
        seen = read(data)
        placed.append(PlacedImage(len(tokens), len(tokens) + seen.num_rows, data, seen.digest))
        tokens += [read.family.image_token] * seen.num_rows
        tokens += torch.randint(2, 200, (4,), generator=generator).tolist()
    return tokens, tuple(placed)


def packed(*prompts, first=4):
    """Prompts with their images, in which every token from `first` on is asked for."""
    tokens, images = zip(*prompts, strict=True)
    asked = [[i >= first for i in range(len(each))] for each in tokens]
    temperatures = [[1.0] * sum(mask) for mask in asked]
    return PackedTokens.pack(tokens, asked, temperatures, images=images)


def log_probs(policy, *prompts):
    """The log-probabilities of each prompt, packed together."""
    batch = packed(*prompts)
    with torch.no_grad():
        found = policy(batch).log_probs
    return found.split([len(tokens) - 4 for tokens, _ in prompts])
=======
"""Chats of small checkpoints that see images, and transformers' own processors as the outside truth."""

import base64
import io
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from PIL import Image
from transformers import AutoImageProcessor, Gemma3Processor, Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from onpolicy.chat.messages import read_chat
from onpolicy.chat.template import ChatTemplate
from onpolicy.images.placing import ImagePlacer
from onpolicy.models.tokenizer import load_tokenizer
from tests.support.tiny_images import encoded_image, write_image_checkpoint_files

KINDS = ("qwen3_vl", "gemma3")
RED, BLUE = encoded_image("red"), encoded_image("blue", (40, 16))


def url_of(image):
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


@cache
def checkpoint(kind):
    """(directory, tokenizer, placer)"""
    directory = write_image_checkpoint_files(Path(mkdtemp()), kind)
    tokenizer = load_tokenizer(str(directory))
    return directory, tokenizer, ImagePlacer.of(directory, tokenizer)


def template(kind, rule="new"):
    _, tokenizer, placer = checkpoint(kind)
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id], rule, placer=placer)


def read(kind, messages):
    return read_chat(messages, checkpoint(kind)[2].see)


def processed(kind, messages, *images):
    """The tokens and pixels of messages in the publishers' form, by their processor."""
    directory, _, _ = checkpoint(kind)
    tokenizer = load_tokenizer(str(directory))
    pixels = AutoImageProcessor.from_pretrained(directory, backend="pil")
    if kind == "qwen3_vl":
        processor = Qwen3VLProcessor(pixels, tokenizer, Qwen3VLVideoProcessor())
    else:
        tokenizer.image_token, tokenizer.boi_token = "<image_soft_token>", "<start_of_image>"
        tokenizer.eoi_token = "<end_of_image>"
        for name in ("image", "boi"):
            token = tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token"))
            setattr(tokenizer, f"{name}_token_id", token)
        processor = Gemma3Processor(pixels, tokenizer, image_seq_length=4)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    opened = [Image.open(io.BytesIO(image)) for image in images]
    found = processor(images=opened, text=text, add_special_tokens=False)
    return list(found["input_ids"][0]), found["pixel_values"]
>>>>>>> img-chat
