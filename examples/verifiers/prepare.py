"""Makes a small Qwen3 that knows what a guess is, and little more.

    python examples/verifiers/prepare.py OUT_DIR

OUT_DIR/warm_start.jsonl    what the model has seen
OUT_DIR/model/              a real Hugging Face checkpoint with a character tokenizer and a chat template

It has seen games whose guesses are letters that were drawn at random: half of them on the right side of
the guess before. Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from warm_start import is_complete, make_tokenizer, warm_start

LETTERS = "abcdefghijkl"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
NUM_ROWS, STEPS = 20_000, 150


def seen(rng: random.Random) -> dict[str, str]:
    """A game up to some guess, and that guess."""
    letter, game, side = rng.choice(LETTERS), "?", LETTERS
    for _ in range(rng.randint(0, 4)):
        guess = rng.choice(side)
        if guess == letter:
            break
        game += f"{guess}<eos>{'<' if letter < guess else '>'}"
        right = [each for each in LETTERS if each != guess and (each < guess) == (letter < guess)]
        side = "".join(right) if rng.random() < 0.5 else LETTERS
    return {"prompt": game, "response": rng.choice(side)}


def main(out: Path) -> None:
    if is_complete(out):
        return
    rng = random.Random(0)
    rows = [seen(rng) for _ in range(NUM_ROWS)]
    warm_start(out, make_tokenizer(LETTERS + "?<>=!", TEMPLATE), rows, STEPS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
