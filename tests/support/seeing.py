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
