"""Makes a random checkpoint of Qwen3-0.6B's geometry, and prompts for it, without any download.

    python benchmarks/make_checkpoint.py OUT_DIR [--layers 28]

OUT_DIR/model/       bfloat16 weights (1.2 GB at 28 layers) and a character tokenizer
OUT_DIR/data.jsonl   64 prompts of 20 to 1,000 tokens

Weights are random, so nothing can be learnt; sizes, and so memory and time, are the real ones.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

LAYERS = 28
NUM_PROMPTS = 64
LONGEST_PROMPT = 1000
LETTERS = "abcdefghijklmnopqrstuvwxyz "


def make_config(layers: int = LAYERS) -> Qwen3Config:
    """Qwen3-0.6B's config.json, with tokens of our own for padding and the end."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def write_prompts(file: Path) -> None:
    """Random letters of random length; the first prompt is the longest."""
    rng = random.Random(0)
    lengths = [LONGEST_PROMPT] + [rng.randint(20, LONGEST_PROMPT) for _ in range(NUM_PROMPTS - 1)]
    prompts = ["".join(rng.choice(LETTERS) for _ in range(length)) for length in lengths]
    file.write_text("".join(json.dumps({"prompt": p, "label": "a"}) + "\n" for p in prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(args.layers), dtype=torch.bfloat16)
    model.save_pretrained(args.directory / "model")
    make_tokenizer().save_pretrained(args.directory / "model")
    write_prompts(args.directory / "data.jsonl")


if __name__ == "__main__":
    main()
