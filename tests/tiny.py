"""Tiny random checkpoints, made on the spot: real Hugging Face files with a character tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

# Sizes that are no multiples of anything convenient.
SIZES = {
    "vocab_size": 137,
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}

ARCHITECTURES = {
    "qwen3": (Qwen3Config, {"head_dim": 48, "tie_word_embeddings": False}),
    "qwen3-tied": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, {"head_dim": 24, "tie_word_embeddings": False}),
    "mistral": (MistralConfig, {"head_dim": 16, "sliding_window": None}),
}

CHARACTERS = [chr(code) for code in range(33, 33 + SIZES["vocab_size"] - 2)]


def make_checkpoint(directory: Path, architecture: str = "qwen3", **changes: object) -> Path:
    """Save a random model of the architecture in float32; `changes` go into its configuration."""
    config_class, sizes = ARCHITECTURES[architecture]
    config = config_class(**{**SIZES, **sizes, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; 0 is padding, 1 ends a sequence."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
