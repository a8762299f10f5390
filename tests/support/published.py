"""Checkpoints as their publishers ship them, shrunk: the files of published/, with random weights.

Each file is the config.json of a published model, less what says nothing here: its keys, also those that
transformers no longer writes, its scaling, windows, quantisation and code are as published, its sizes
and token ids are small. Weights come in several files with an index, and the tokenizer has added tokens
and fewer tokens than the vocabulary has rows.
"""

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

from onpolicy.models.published import read_config
from onpolicy.models.text_part import has_text_part

FILES = {file.stem: file for file in sorted((Path(__file__).parent / "published").glob("*.json"))}

OWN_CODE = 'raise SystemExit("the code of a checkpoint was run")\n'

QUANTIZED = "quantization_config={}: only weights in float32 or bfloat16"
LINEAR_ATTENTION = "which has linear attention or state-space layers"

REFUSED = {
    "deepseek-v3": QUANTIZED.format("fp8"),
    "kimi-k2-instruct": QUANTIZED.format("fp8"),
    "minimax-m2": QUANTIZED.format("fp8"),
    "gpt-oss-20b": QUANTIZED.format("mxfp4"),
    "jamba-v0.1": LINEAR_ATTENTION,
    "minimax-text-01": "transformers .* has no class of its own for model_type=minimax_text_01",
    "olmo-7b-clipped": "clip_qkv=8.0",
}
"""What is said of those that are refused: a regular expression."""

DEQUANTIZED = tuple(name for name, said in REFUSED.items() if "quantization_config" in said)
"""Those that are refused for their numbers alone."""


def published(name):
    """The config.json, as published."""
    raw = json.loads(FILES[name].read_text())
    return raw


PROCESSORS = {
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4,
        "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
}  # fmt: skip
"""The preprocessor_config.json of shrunk checkpoints that see images, by model_type."""


def make_published(directory, name, *, dequantized=False, **changes):
    """Write a checkpoint with float32 weights; `changes` go into its config.json.

    dequantized: without the quantization_config, as transformers saves it in other numbers.
    """
    raw = {**published(name), **changes}
    if dequantized:
        del raw["quantization_config"]
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, raw)
    torch.manual_seed(0)
    model = _model_of(directory)
    for parameter_name, tensor in model.state_dict().items():
        if parameter_name.endswith("norm.weight"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        elif tensor.is_floating_point() and tensor.dim() > 1:
            torch.nn.init.normal_(tensor, std=0.15)
    model.save_pretrained(directory, max_shard_size="100KB")
    make_padded_tokenizer().save_pretrained(directory)
    if processor := PROCESSORS.get(raw.get("model_type")):
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    write_config(directory, raw)
    return directory


def _model_of(directory):
    """The model that a publisher saved: with its tower, if it has one."""
    if has_text_part(directory):
        whole = AutoConfig.from_pretrained(directory)
        # transformers ties Mistral-3's head where config.json does not say; the published one is not.
        whole.tie_word_embeddings = read_config(str(directory)).tie_word_embeddings
        return AutoModelForImageTextToText.from_config(whole, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(read_config(str(directory)), dtype=torch.float32)


def write_config(directory, raw):
    """config.json, and beside it the code that it names, which must never run."""
    (directory / "config.json").write_text(json.dumps(raw))
    for reference in raw.get("auto_map", {}).values():
        if "/" not in reference:
            (directory / f"{reference.split('.')[0]}.py").write_text(OWN_CODE)


def make_padded_tokenizer():
    """One token per character, and added ones that end a turn: 99 tokens for 137 rows."""
    characters = [chr(code) for code in range(33, 33 + 94)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )
    fast.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return fast
