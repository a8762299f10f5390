"""Checkpoint of random weights with the sizes of a published model, for measuring.

    python -m benchmarks.random_checkpoint --geometry qwen3-0.6b DIR               # all 28 layers
    python -m benchmarks.random_checkpoint --geometry qwen3-0.6b --layers 4 DIR

DIR becomes a real Hugging Face checkpoint: bfloat16 in shards, and a tokenizer of the full vocabulary,
one token per printable ASCII character and names for the rest. The same command gives the same numbers.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ["<pad>", "<eos>"]
QWEN3 = {
    "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512,
    },
}  # fmt: skip
"""The sizes of Qwen/Qwen3-0.6B and Qwen/Qwen3-4B, and of a model to try a benchmark with."""

COMMON: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable character; 0 is padding, 1 ends a sequence."""
    tokens = [*SPECIAL, *string.printable]
    tokens += [f"<{i}>" for i in range(len(tokens), vocab_size)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--vocab-size", type=int, help="a smaller vocabulary than the model's")
    args = parser.parse_args()
    sizes = {**COMMON, **GEOMETRIES[args.geometry]}
    sizes["num_hidden_layers"] = args.layers or sizes["num_hidden_layers"]
    sizes["vocab_size"] = args.vocab_size or sizes["vocab_size"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(args.directory, max_shard_size="500MB")
    make_tokenizer(sizes["vocab_size"]).save_pretrained(args.directory)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{args.directory}: {millions:.0f} million parameters")


if __name__ == "__main__":
    main()
