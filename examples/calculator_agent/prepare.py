"""Makes what the calculator agent needs: products, and a small Qwen3 that has seen a calculator used.

    python examples/calculator_agent/prepare.py OUT_DIR

OUT_DIR/data.jsonl          `{"prompt": "37*58=", "label": "2146"}`
OUT_DIR/warm_start.jsonl    what the model has seen
OUT_DIR/model/              a real Hugging Face checkpoint with a character tokenizer

Half of the products are of one digit each, which the model comes to know by heart; the others, of two
digits, are beyond it. It sees answers and calls, `[37*58]`, as often for the ones as for the others, so
it can do all that the agent has to do, and does not know when. Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import random
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from warm_start import is_complete, make_tokenizer, slip, warm_start, write_rows

CHARACTERS = "0123456789*=[]()"
ONE_DIGIT, TWO_DIGITS = range(2, 10), range(11, 100)
NUM_ROWS, STEPS = 20_000, 400
SLIPPED_SHARE = 0.2


def problem(rng: random.Random) -> tuple[str, str]:
    """A product and its value."""
    digits = rng.choice([ONE_DIGIT, TWO_DIGITS])
    a, b = rng.choice(digits), rng.choice(digits)
    return f"{a}*{b}", str(a * b)


def problems(rng: random.Random) -> list[dict[str, str]]:
    """Returns all products of one digit, and as many others: a run drops duplicates."""
    pairs = [*product(ONE_DIGIT, repeat=2)]
    pairs += rng.sample([*product(TWO_DIGITS, repeat=2)], len(pairs))
    return [{"prompt": f"{a}*{b}=", "label": str(a * b)} for a, b in pairs]


def seen(rng: random.Random) -> dict[str, str]:
    """A call, an answer without one, or one after a call, which is wrong now and then."""
    question, value = problem(rng)
    call = f"[{question}]"
    after = slip(value, rng) if rng.random() < SLIPPED_SHARE else value
    rows = [("", call), ("", value), (f"{call}({value})", after)]
    ((read, write),) = rng.choices(rows, weights=[2, 2, 1])
    return {"prompt": f"{question}={read}", "response": write}


def main(out: Path) -> None:
    if is_complete(out):
        return
    rng = random.Random(0)
    write_rows(out / "data.jsonl", problems(rng))
    warm_start(out, make_tokenizer(CHARACTERS), [seen(rng) for _ in range(NUM_ROWS)], STEPS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
