"""Makes what the calculator agent needs: products, and a small Qwen3 that has seen a calculator used.

    python examples/calculator_agent/prepare.py OUT_DIR

OUT_DIR/data.jsonl, OUT_DIR/eval.jsonl   `{"prompt": "347*589=", "label": "204383"}`
OUT_DIR/model/                           a real Hugging Face checkpoint with a character tokenizer

Half of the products are of single digits, which the model can know by heart; the others, of three digits
each, are beyond it. It is trained for a minute or two on answers and on calls, `[347*589]`, that are
chosen without regard to the product, and a third of the answers after calls are wrong on purpose: it can
do all that the agent has to do, and does not know when. Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from onpolicy.compat.process import prepare_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from prepare import make_model, make_tokenizer, save, warm_start

CHARACTERS = "0123456789*=[]()"
EASY_SHARE = 0.5
WRONG_SHARE = 0.35
STEPS = 600
SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}


def problem(rng: random.Random) -> tuple[str, str]:
    """A product and its value."""
    low, high = (2, 9) if rng.random() < EASY_SHARE else (100, 999)
    a, b = rng.randint(low, high), rng.randint(low, high)
    return f"{a}*{b}", str(a * b)


def slip(digits: str, rng: random.Random) -> str:
    """One digit of it is another."""
    place = rng.randrange(len(digits))
    return digits[:place] + str((int(digits[place]) + rng.randint(1, 9)) % 10) + digits[place + 1 :]


def training_row(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """What the model reads, and the answer or the call that it is to write then."""
    product, value = problem(rng)
    call, end = f"[{product}]", [tokenizer.eos_token_id]
    read, write, end = rng.choice([
        (f"{product}=", call, []),
        (f"{product}=", value, end),
        (f"{product}={call}({value})", slip(value, rng) if rng.random() < WRONG_SHARE else value, end),
    ])  # fmt: skip
    prompt = tokenizer.encode(read)
    return prompt + tokenizer.encode(write) + end, len(prompt)


def write_problems(file: Path, count: int, rng: random.Random) -> None:
    problems = [problem(rng) for _ in range(count)]
    rows = ({"prompt": f"{product}=", "label": value} for product, value in problems)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(out: Path) -> None:
    if (out / "model" / "config.json").exists():
        return
    prepare_process()
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    write_problems(out / "data.jsonl", 3000, rng)
    write_problems(out / "eval.jsonl", 200, rng)
    torch.manual_seed(0)
    tokenizer = make_tokenizer(CHARACTERS)
    model = make_model(len(tokenizer), **SIZES)
    warm_start(model, lambda step: training_row(tokenizer, rng), STEPS, 2e-3)
    save(model, tokenizer, out / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
