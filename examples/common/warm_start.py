"""The warm start of an agent's example: a small Qwen3 that has seen all allowed actions.

Rows are `{"prompt": text, "response": text}`: what the model reads, and what it is to write then, the
token that ends it left out. They are written beside the model, as any supervised training takes them.
PyTorch, which takes seconds, is imported where something is made: mostly all is there already.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from onpolicy.compat.process import prepare_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

Row = Mapping[str, str]

SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 3, "num_key_value_heads": 3}
"""0.2 million parameters."""


def is_complete(out: Path) -> bool:
    """Whether an earlier call has made all of it."""
    return (out / "model" / "config.json").exists()


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def slip(digits: str, rng: random.Random) -> str:
    """One digit of it is another."""
    place = rng.randrange(len(digits))
    return digits[:place] + str((int(digits[place]) + rng.randint(1, 9)) % 10) + digits[place + 1 :]


def make_tokenizer(characters: str, chat_template: str = ""):
    """One token per character."""
    import prepare as quickstart

    tokenizer = quickstart.make_tokenizer(characters)
    if chat_template:
        tokenizer.chat_template = chat_template
    return tokenizer


def warm_start(out: Path, tokenizer, rows: Sequence[Row], steps: int, lr: float = 4e-3) -> None:
    """Writes OUT/warm_start.jsonl, the rows, and OUT/model, a Qwen3 that was trained on them."""
    import prepare as quickstart
    import torch

    prepare_process()
    write_rows(out / "warm_start.jsonl", rows)
    read = tokenizer([row["prompt"] for row in rows])["input_ids"]
    written = tokenizer([row["response"] + tokenizer.eos_token for row in rows])["input_ids"]
    examples = [(r + w, len(r)) for r, w in zip(read, written, strict=True)]
    rng = random.Random(0)
    torch.manual_seed(0)
    model = quickstart.make_model(len(tokenizer), **SIZES)
    quickstart.warm_start(model, lambda step: rng.choice(examples), steps, lr)
    quickstart.save(model, tokenizer, out / "model")
