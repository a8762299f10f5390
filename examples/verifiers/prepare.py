"""Makes a small Qwen3 that knows what a guess is, and little more.

    python examples/verifiers/prepare.py OUT_DIR

OUT_DIR/warm_start.jsonl    what the model has seen
OUT_DIR/model/              a real Hugging Face checkpoint with a character tokenizer and a chat template

It has seen games whose guesses were drawn at random: half of them from all letters, half from those
that the hints leave. So it knows what hints mean, and heeds every other. Does nothing if OUT_DIR is
complete.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from warm_start import is_complete, make_tokenizer, warm_start

LETTERS = "abcdef"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
NUM_ROWS, STEPS = 20_000, 300


def seen(rng: random.Random) -> dict[str, str]:
    """A game up to some guess, and that guess."""
    letter, game, left = rng.choice(LETTERS), "?", LETTERS
    for _ in range(rng.randint(0, 2)):
        guess = rng.choice(LETTERS if rng.random() < 0.5 else left)
        if guess == letter:
            break
        game += f"{guess}<eos>{'<' if letter < guess else '>'}"
        left = "".join(x for x in left if x != guess and (x < guess) == (letter < guess))
    return {"prompt": game, "response": rng.choice(LETTERS if rng.random() < 0.5 else left)}


def main(out: Path) -> None:
    if is_complete(out):
        return
    rng = random.Random(0)
    rows = [seen(rng) for _ in range(NUM_ROWS)]
    warm_start(out, make_tokenizer(LETTERS + "?<>=!", TEMPLATE), rows, STEPS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
