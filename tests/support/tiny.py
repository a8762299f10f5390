"""Tiny random checkpoints, made on the spot: real Hugging Face files with a character tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
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
    "qwen3-moe": (
        Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 72},
    ),
    # Other names in the checkpoint than in the model.
    "mixtral": (
        MixtralConfig,
        {"head_dim": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 72},
    ),
    # A dense first layer, shared experts, scores by sigmoid and corrected by a buffer, groups.
    "glm4-moe": (
        Glm4MoeConfig,
        {
            "head_dim": 16,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 72,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}
EXPERT_ARCHITECTURES = ("qwen3-moe", "mixtral", "glm4-moe")

CHARACTERS = [chr(code) for code in range(33, 33 + SIZES["vocab_size"] - 2)]


def make_checkpoint(directory: Path, architecture: str = "qwen3", **changes: object) -> Path:
    """Save a random model of the architecture in float32; `changes` go into its configuration."""
    config_class, sizes = ARCHITECTURES[architecture]
    config = config_class(**{**SIZES, **sizes, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.3)
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
