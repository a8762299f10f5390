"""Makes what the agent needs: products, and a small Qwen3 that has seen a tool called.

    python examples/openai_agent/prepare.py OUT_DIR

OUT_DIR/data.jsonl, OUT_DIR/eval.jsonl   `{"prompt": "347*89=", "label": "30883"}`
OUT_DIR/model/                           a real Hugging Face checkpoint with a character tokenizer

The model is trained for a minute on calls, `[mul(a=347,b=89)]`, on results of the tool, and on answers.
Of these many are wrong on purpose: guesses without a call, and slips in copying. Does nothing if OUT_DIR
is complete.
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

CHARACTERS = "0123456789*=[](),mulab"
GUESSED_SHARE, SLIPPED_SHARE = 0.5, 0.4
STEPS = 600
SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ message.content }}"
    "{% elif message.role == 'tool' %}({{ message.content }})"
    "{% else %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }}({% for name, value in call.function.arguments.items() %}"
    "{{ name }}={{ value }}{% if not loop.last %},{% endif %}{% endfor %})]"
    "{% endfor %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def tokenizer_with_template() -> PreTrainedTokenizerFast:
    """One token per character, and chats as the model is to see them."""
    tokenizer = make_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def problem(rng: random.Random) -> tuple[int, int]:
    return rng.randint(100, 999), rng.randint(10, 99)


def slip(digits: str, rng: random.Random) -> str:
    """One digit of it is another."""
    place = rng.randrange(len(digits))
    return digits[:place] + str((int(digits[place]) + rng.randint(1, 9)) % 10) + digits[place + 1 :]


def training_row(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """What the model reads, and the answer or the call that it is to write then."""
    a, b = problem(rng)
    question, call, value = f"{a}*{b}=", f"[mul(a={a},b={b})]", str(a * b)
    end = tokenizer.eos_token_id
    if rng.random() < 0.5:
        read = tokenizer.encode(question)
        write = slip(value, rng) if rng.random() < GUESSED_SHARE else call
    else:
        read = [*tokenizer.encode(question + call), end, *tokenizer.encode(f"({value})")]
        write = slip(value, rng) if rng.random() < SLIPPED_SHARE else value
    return [*read, *tokenizer.encode(write), end], len(read)


def write_problems(file: Path, count: int, rng: random.Random) -> None:
    problems = dict.fromkeys(problem(rng) for _ in range(count))
    rows = ({"prompt": f"{a}*{b}=", "label": str(a * b)} for a, b in problems)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(out: Path, steps: int = STEPS) -> None:
    if (out / "model" / "config.json").exists():
        return
    prepare_process()
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    write_problems(out / "data.jsonl", 3000, rng)
    write_problems(out / "eval.jsonl", 100, rng)
    torch.manual_seed(0)
    tokenizer = tokenizer_with_template()
    model = make_model(len(tokenizer), **SIZES)
    warm_start(model, lambda step: training_row(tokenizer, rng), steps, 2e-3)
    save(model, tokenizer, out / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
