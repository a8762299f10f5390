"""Makes a small Qwen3 that knows what a guess is, and little more.

    python examples/verifiers/prepare.py OUT_DIR

OUT_DIR/model/   a real Hugging Face checkpoint with a character tokenizer and a chat template

It learns in half a minute from games whose guesses are letters that were drawn at random: half of them
on the right side of the guess before. Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from onpolicy.compat.process import prepare_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from prepare import make_model, make_tokenizer, save, warm_start

LETTERS = "abcdefghijkl"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
STEPS = 150
SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}


def training_row(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """A game up to some guess, and that guess."""
    eos, letter = [tokenizer.eos_token_id], rng.choice(LETTERS)
    game, side = tokenizer.encode("?"), LETTERS
    for _ in range(rng.randint(0, 4)):
        guess = rng.choice(side)
        game += tokenizer.encode(guess) + eos
        if guess == letter:
            game = tokenizer.encode("?")
            side = LETTERS
            continue
        hint = "<" if letter < guess else ">"
        game += tokenizer.encode(hint)
        right = [each for each in LETTERS if (each < guess) == (letter < guess) and each != guess]
        side = "".join(right) if rng.random() < 0.5 else LETTERS
    return game + tokenizer.encode(rng.choice(side)) + eos, len(game)


def main(out: Path) -> None:
    if (out / "model" / "config.json").exists():
        return
    prepare_process()
    rng = random.Random(0)
    torch.manual_seed(0)
    tokenizer = make_tokenizer(LETTERS + "?<>=!")
    tokenizer.chat_template = TEMPLATE
    model = make_model(len(tokenizer), **SIZES)
    out.mkdir(parents=True, exist_ok=True)
    warm_start(model, lambda step: training_row(tokenizer, rng), STEPS, 2e-3)
    save(model, tokenizer, out / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
