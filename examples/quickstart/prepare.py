"""Makes what the quickstart needs: arithmetic problems and a small Qwen3 that is right sometimes.

    python examples/quickstart/prepare.py OUT_DIR

OUT_DIR/data.jsonl, OUT_DIR/eval.jsonl   `{"prompt": "37+45=", "label": "82"}`
OUT_DIR/model/                           a real Hugging Face checkpoint with a character tokenizer

The model is trained for a minute on problems with their sums, many of which are wrong on purpose (a
zero in front, or one too large), so that it samples the right answer about a third of the time:
something for reinforcement learning to improve. Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from onpolicy.compat.process import prepare_process

CHARACTERS = "0123456789+="
SPECIAL = ["<pad>", "<eos>"]
MAX_OPERAND = 49
PADDED_SHARE = 0.55
MISCOUNTED_SHARE = 0.05
STEPS = 600
BATCH = 128


def make_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        clean_up_tokenization_spaces=False,
    )


def make_model(vocab_size: int, **sizes: int) -> torch.nn.Module:
    """A Qwen3 of 1.6 million parameters, or of other sizes."""
    usual = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = Qwen3Config(
        vocab_size=vocab_size,
        head_dim=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **{**usual, **sizes},
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def problem(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    a, b = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
    return f"{a}+{b}=", str(a + b)


def warm_start(
    model: torch.nn.Module, make_row: Callable[[int], tuple[list[int], int]], steps: int, lr: float
) -> None:
    """Supervised steps; `make_row(step)`: tokens of a problem and its answer, and how many ask."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    start = time.time()
    for step in range(steps):
        rows = [make_row(step) for _ in range(BATCH)]
        length = max(len(tokens) for tokens, _ in rows)
        tokens = torch.zeros(BATCH, length, dtype=torch.long)
        targets = torch.full((BATCH, length), -100)
        for i, (row, prompt_len) in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            targets[i, prompt_len : len(row)] = torch.tensor(row[prompt_len:])
        logits = model(tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"warm start {step + 1}/{steps}  loss {loss.item():.3f}  {time.time() - start:.0f} s",
                flush=True,
            )


def training_row(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """A problem whose answer often has a zero in front, and sometimes is one too large."""
    question, answer = problem(rng)
    chance = rng.random()
    if chance < PADDED_SHARE:
        answer = "0" + answer
    elif chance < PADDED_SHARE + MISCOUNTED_SHARE:
        answer = str(int(answer) + 1)
    prompt = tokenizer.encode(question)
    return prompt + tokenizer.encode(answer) + [tokenizer.eos_token_id], len(prompt)


def write_problems(file: Path, count: int, rng: random.Random) -> None:
    problems = dict(problem(rng) for _ in range(count))
    file.write_text(
        "".join(json.dumps({"prompt": q, "label": a}) + "\n" for q, a in problems.items())
    )


def main(out: Path) -> None:
    if (out / "model" / "config.json").exists():
        return
    prepare_process()  # the same model on every machine that a run has the same bits on
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    write_problems(out / "data.jsonl", 3000, rng)
    write_problems(out / "eval.jsonl", 200, rng)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    warm_start(model, lambda step: training_row(tokenizer, rng), STEPS, 2e-3)
    save(model, tokenizer, out / "model")


def save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """A checkpoint in bfloat16: complete, or not there."""
    partial = directory.with_suffix(".partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where model and data are written")
    main(parser.parse_args().directory)
