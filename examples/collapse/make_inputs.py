"""The inputs of the study: prefix sums, every second one unsolvable, and a small Qwen3.

    python examples/collapse/make_inputs.py OUT_DIR [DIGITS [EXPERTS [SEED]]]

A problem has 12 digits, and the model no experts, if nothing else is said. SEED makes another model,
from other numbers and other problems; those of data.jsonl are the same.

OUT_DIR/data.jsonl   `{"prompt": "012345678901=", "label": "013605186756"}`: running sums modulo 10
OUT_DIR/model/       a real Hugging Face checkpoint with the quickstart's character tokenizer

Problems that begin with 5 to 9 have a label that no answer reaches. They alternate with solvable
ones, so that half of every batch is unsolvable, and the reward of the solvable half is twice the mean.
The model learns for a minute, in the second half of it from answers with slips, so that it is right a
third of the time. Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import accumulate
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from onpolicy.compat.process import prepare_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from prepare import make_tokenizer, save, warm_start

DIGITS = 12
UNREACHABLE = "none"
STEPS = 350
SLIPS_FROM = 0.55
"""Share of the warm start after which answers have slips."""
SLIP = 0.08
"""Probability that a digit of such an answer is one too large, which is carried on; less in answers of
more digits, so that as many of them are right."""


def make_model(vocab_size: int, num_digits: int, num_experts: int) -> torch.nn.Module:
    """A Qwen3 of 0.19 million parameters, or with two of `num_experts` for each token."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": max(64, 2 * num_digits + 8),
        "tie_word_embeddings": not num_experts,  # SGLang's own Qwen3-MoE leaves a tied one empty
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
    config: PretrainedConfig = (
        Qwen3MoeConfig(**sizes, **experts) if num_experts else Qwen3Config(**sizes)
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def digits(rng: random.Random, solvable: bool, count: int = DIGITS) -> list[int]:
    """The digits of a problem; the first one says whether it can be solved."""
    first = rng.randrange(5) if solvable else rng.randrange(5, 10)
    return [first, *(rng.randrange(10) for _ in range(count - 1))]


def text(values: list[int]) -> str:
    return "".join(map(str, values))


def answer(values: list[int], rng: random.Random | None = None) -> str:
    """The running sums modulo 10; with `rng`, some are one too large, and what follows as well."""
    slip = 1 - (1 - SLIP) ** (DIGITS / len(values))
    slips = [int(rng is not None and rng.random() < slip) for _ in values]
    return text(
        [s % 10 for s in accumulate(v + slip for v, slip in zip(values, slips, strict=True))]
    )


def write_problems(file: Path, count: int, rng: random.Random, num_digits: int = DIGITS) -> None:
    """Solvable and unsolvable ones in turn."""
    problems = [(digits(rng, i % 2 == 0, num_digits), i % 2 == 0) for i in range(count)]
    records = [
        {"prompt": text(values) + "=", "label": answer(values) if solvable else UNREACHABLE}
        for values, solvable in problems
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def main(out: Path, num_digits: int = DIGITS, num_experts: int = 0, seed: int = 0) -> None:
    if (out / "model" / "config.json").exists():
        return
    prepare_process()
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    write_problems(out / "data.jsonl", 6000, rng, num_digits)
    if seed:
        rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), num_digits, num_experts)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters")

    def row(step: int) -> tuple[list[int], int]:
        values = digits(rng, rng.random() < 0.5, num_digits)
        prompt = tokenizer.encode(text(values) + "=")
        response = answer(values, rng if step >= SLIPS_FROM * STEPS else None)
        return [*prompt, *tokenizer.encode(response), tokenizer.eos_token_id], len(prompt)

    warm_start(model, row, STEPS, 3e-3)
    save(model, tokenizer, out / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
