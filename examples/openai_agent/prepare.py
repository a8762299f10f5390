"""Makes what the agent needs: products, and a small Qwen3 that has seen a tool called.

    python examples/openai_agent/prepare.py OUT_DIR

OUT_DIR/data.jsonl          `{"prompt": "37*58=", "label": "2146"}`
OUT_DIR/warm_start.jsonl    what the model has seen
OUT_DIR/model/              a real Hugging Face checkpoint with a character tokenizer

The model sees calls, `[mul(a=37,b=58)]`, guesses without a call, and answers after the tool's, many of
which are wrong on purpose. Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import random
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from warm_start import is_complete, make_tokenizer, slip, warm_start, write_rows

CHARACTERS = "0123456789*=[](),mulab"
TWO_DIGITS = range(11, 100)
NUM_PROBLEMS, NUM_ROWS, STEPS = 2000, 20_000, 200
GUESSED_SHARE, SLIPPED_SHARE = 0.5, 0.4

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


def tokenizer_with_template():
    """One token per character, and chats as the model is to see them."""
    return make_tokenizer(CHARACTERS, TEMPLATE)


def problems(rng: random.Random) -> list[dict[str, str]]:
    pairs = rng.sample([*product(TWO_DIGITS, repeat=2)], NUM_PROBLEMS)
    return [{"prompt": f"{a}*{b}=", "label": str(a * b)} for a, b in pairs]


def seen(rng: random.Random) -> dict[str, str]:
    """A call, a guess in its place, or an answer after the tool's."""
    a, b = rng.choice(TWO_DIGITS), rng.choice(TWO_DIGITS)
    question, call, value = f"{a}*{b}=", f"[mul(a={a},b={b})]", str(a * b)
    if rng.random() < 0.5:
        write = slip(value, rng) if rng.random() < GUESSED_SHARE else call
        return {"prompt": question, "response": write}
    write = slip(value, rng) if rng.random() < SLIPPED_SHARE else value
    return {"prompt": f"{question}{call}<eos>({value})", "response": write}


def main(out: Path) -> None:
    if is_complete(out):
        return
    rng = random.Random(0)
    write_rows(out / "data.jsonl", problems(rng))
    warm_start(out, tokenizer_with_template(), [seen(rng) for _ in range(NUM_ROWS)], STEPS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
