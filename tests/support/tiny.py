"""Tiny random checkpoints, made on the spot: real Hugging Face files with a character tokenizer."""

import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

# Sizes that are no multiples of anything convenient.
SIZES = {
    "vocab_size": 137, "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.15, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip

ARCHITECTURES = {
    "qwen3": (hf.Qwen3Config, {"head_dim": 48, "tie_word_embeddings": False}),
    "qwen3-tied": (hf.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (hf.Qwen2Config, {"tie_word_embeddings": False}),
    "llama": (hf.LlamaConfig, {"head_dim": 24, "tie_word_embeddings": False}),
    "mistral": (hf.MistralConfig, {"head_dim": 16, "sliding_window": None}),
    "qwen3-moe": (
        hf.Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 72},
    ),
    # Other names in the checkpoint than in the model.
    "mixtral": (
        hf.MixtralConfig,
        {"head_dim": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 72},
    ),
    # A dense first layer, shared experts, scores by sigmoid and corrected by a buffer, groups.
    "glm4-moe": (
        hf.Glm4MoeConfig,
        {
            "head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 72,
            "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 2,
            "topk_group": 1,
        },
    ),
}  # fmt: skip
EXPERT_ARCHITECTURES = ("qwen3-moe", "mixtral", "glm4-moe")

WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 72}
LATENT_ATTENTION = {
    **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 24, "num_key_value_heads": 4,
}  # fmt: skip

MORE_ARCHITECTURES = {
    "smollm3": (hf.SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "mistral-window": (hf.MistralConfig, {"head_dim": 16, "sliding_window": 24}),
    "qwen2-window": (hf.Qwen2Config, {"use_sliding_window": True, **WINDOWS}),
    "phi3": (hf.Phi3Config, {"sliding_window": None}),
    "phi": (hf.PhiConfig, {"partial_rotary_factor": 0.5}),
    "granite": (
        hf.GraniteConfig,
        {
            "embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.15,
        },
    ),
    "gemma": (hf.GemmaConfig, {"head_dim": 16}),
    "gemma2": (hf.Gemma2Config, {"head_dim": 16, "query_pre_attn_scalar": 20, **WINDOWS}),
    "gemma3": (hf.Gemma3TextConfig, {"head_dim": 16, "query_pre_attn_scalar": 20, **WINDOWS}),
    # Heads of two sizes, shared keys and values, keys that are values, inputs of every layer.
    "gemma4": (
        hf.Gemma4TextConfig,
        {
            "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True,
            "num_key_value_heads": 4, "num_global_key_value_heads": 2,
            "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 139,
            "final_logit_softcapping": 5.0, "use_double_wide_mlp": True, "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4-moe": (
        hf.Gemma4TextConfig,
        {
            "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
            "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
            "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 72, **WINDOWS,
        },
    ),
    "olmo": (hf.OlmoConfig, {}),
    "olmo2": (hf.Olmo2Config, {}),
    "olmo3": (hf.Olmo3Config, WINDOWS),
    "glm": (hf.GlmConfig, {"head_dim": 24, "attention_bias": True}),
    "glm4": (hf.Glm4Config, {"head_dim": 24}),
    "cohere": (hf.CohereConfig, {"logit_scale": 0.3}),
    "cohere2": (hf.Cohere2Config, {"logit_scale": 0.3, **WINDOWS}),
    "starcoder2": (hf.Starcoder2Config, {"use_bias": True, "sliding_window": None}),
    "nemotron": (hf.NemotronConfig, {"partial_rotary_factor": 0.5}),
    "gpt-neox": (hf.GPTNeoXConfig, {"num_key_value_heads": 4}),
    "exaone4": (hf.Exaone4Config, WINDOWS),
    "exaone-moe": (
        hf.ExaoneMoeConfig,
        {
            **EXPERTS, **WINDOWS, "head_dim": 16, "num_experts": 8, "num_shared_experts": 1,
            "n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "ernie4.5": (hf.Ernie4_5Config, {"head_dim": 16, "use_bias": True}),
    "qwen2-moe": (
        hf.Qwen2MoeConfig,
        {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 56},
    ),
    "olmoe": (hf.OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 72}),
    "minimax-m2": (
        hf.MiniMaxM2Config,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 72, "head_dim": 16},
    ),
    "ernie4.5-moe": (
        hf.Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 72,
            "moe_num_shared_experts": 1, "tie_word_embeddings": False,
        },
    ),
    "hunyuan-moe": (
        hf.HunYuanMoEV1Config,
        {"num_experts": 6, "moe_topk": 2, "intermediate_size": 72, "head_dim": 16},
    ),
    "dots1": (
        hf.Dots1Config,
        {
            **EXPERTS, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
    "phimoe": (
        hf.PhimoeConfig,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 72},
    ),
    "granite-moe": (hf.GraniteMoeConfig, {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "gpt-oss": (
        hf.GptOssConfig,
        {
            "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16,
            "intermediate_size": 72, **WINDOWS,
        },
    ),
    "glm4-moe-lite": (hf.Glm4MoeLiteConfig, LATENT_ATTENTION),
    "deepseek-v2": (hf.DeepseekV2Config, {**LATENT_ATTENTION, "n_group": 1, "topk_group": 1}),
    "deepseek-v3": (hf.DeepseekV3Config, LATENT_ATTENTION),
    # A layer of experts and a dense one; one that rotates and norms its keys, and one that does neither.
    "llama4": (
        hf.Llama4TextConfig,
        {
            "num_local_experts": 4, "head_dim": 16, "intermediate_size": 72, "num_experts_per_tok": 2,
            "intermediate_size_mlp": 208, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0],
        },
    ),
    "jamba": (hf.JambaConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "minimax": (hf.MiniMaxConfig, {"num_local_experts": 6, "head_dim": 16, "intermediate_size": 72}),
    "qwen3-next": (
        hf.Qwen3NextConfig,
        {
            **EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 56, "head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 24, "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3.5": (
        hf.Qwen3_5TextConfig,
        {
            "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
            "linear_key_head_dim": 24, "linear_value_head_dim": 16, "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3.5-moe": (
        hf.Qwen3_5MoeTextConfig,
        {
            **EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 56, "head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}  # fmt: skip
"""Tried by tests/onpolicy/models/test_architectures.py and tests/support/architecture_table.py."""

ALL_ARCHITECTURES = ARCHITECTURES | MORE_ARCHITECTURES

REFUSED = {
    **dict.fromkeys(("minimax", "jamba"), "which has linear attention or state-space layers"),
}
"""What `require_alignable` says of those that have no aligned operators: a regular expression."""

CHARACTERS = [chr(code) for code in range(33, 33 + SIZES["vocab_size"] - 2)]


def make_checkpoint(directory, architecture="qwen3", **changes):
    """Save a random model of the architecture in float32; `changes` go into its configuration."""
    config_class, sizes = ALL_ARCHITECTURES[architecture]
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


def make_tokenizer():
    """One token per character; 0 is padding, 1 ends a sequence."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
