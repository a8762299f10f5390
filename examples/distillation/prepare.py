"""Makes what the distillation needs: rows to learn from, and two small Qwen3 that know nothing yet.

    python examples/distillation/prepare.py OUT_DIR

OUT_DIR/right.jsonl, OUT_DIR/wrong.jsonl   rows for `onpolicy sft`: sums, in the latter often wrong
OUT_DIR/data.jsonl, OUT_DIR/eval.jsonl     problems with their answers
OUT_DIR/teacher, OUT_DIR/student           Hugging Face checkpoints, of 0.4 and of 0.1 million parameters

Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch

from onpolicy.compat.process import prepare_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from prepare import make_model, make_tokenizer, problem, save, write_problems

ROWS = 40_000
PADDED_SHARE = 0.6
"""Answers of the student's rows that have a zero in front."""

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TEACHER = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, **HEADS}
STUDENT = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, **HEADS}


def write_rows(file: Path, rng: random.Random, padded_share: float) -> None:
    rows = []
    for _ in range(ROWS):
        question, answer = problem(rng)
        zero = "0" if rng.random() < padded_share else ""
        rows.append({"prompt": question, "label": zero + answer})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(out: Path) -> None:
    if (out / "student" / "config.json").exists():
        return
    prepare_process()
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    write_rows(out / "right.jsonl", rng, 0.0)
    write_rows(out / "wrong.jsonl", rng, PADDED_SHARE)
    write_problems(out / "data.jsonl", 3000, rng)
    write_problems(out / "eval.jsonl", 200, rng)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    save(make_model(len(tokenizer), **TEACHER), tokenizer, out / "teacher")
    save(make_model(len(tokenizer), **STUDENT), tokenizer, out / "student")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
