"""Makes what the market needs: its years, and a small Qwen3 that invests and saves as often.

    python examples/mid_episode_rewards/prepare.py OUT_DIR

OUT_DIR/data.jsonl          `{"prompt": "4821:", "label": "wild", "lucky": "02579"}`
OUT_DIR/warm_start.jsonl    what the model has seen: both choices as often, and any digit after them
OUT_DIR/model/              a real Hugging Face checkpoint with a character tokenizer

Neither the kind of a year nor its lucky digits can be told from its number. Does nothing if OUT_DIR is
complete.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from warm_start import is_complete, make_tokenizer, warm_start, write_rows

DIGITS = "0123456789"
NUM_YEARS, NUM_ROWS, STEPS = 1000, 20_000, 100
WILD_SHARE, NUM_LUCKY = 0.6, 5


def years(rng: random.Random) -> list[dict[str, Any]]:
    """Returns years in random order, WILD_SHARE of them wild."""
    num_wild = round(WILD_SHARE * NUM_YEARS)
    kinds = ["wild"] * num_wild + ["calm"] * (NUM_YEARS - num_wild)
    rng.shuffle(kinds)
    numbers = rng.sample(range(10_000), NUM_YEARS)
    return [
        {"prompt": f"{n:04}:", "label": kind, "lucky": "".join(rng.sample(DIGITS, NUM_LUCKY))}
        for n, kind in zip(numbers, kinds, strict=True)
    ]


def seen(rng: random.Random) -> dict[str, str]:
    """A choice, or a lot after one."""
    year, choice = f"{rng.randrange(10_000):04}:", rng.choice("is")
    if rng.random() < 0.5:
        return {"prompt": year, "response": choice}
    return {"prompt": f"{year}{choice}>", "response": rng.choice(DIGITS)}


def main(out: Path) -> None:
    if is_complete(out):
        return
    rng = random.Random(0)
    write_rows(out / "data.jsonl", years(rng))
    rows = [seen(rng) for _ in range(NUM_ROWS)]
    warm_start(out, make_tokenizer(DIGITS + "is:>"), rows, STEPS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
