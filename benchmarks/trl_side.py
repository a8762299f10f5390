"""TRL's GRPOTrainer on the quickstart's model and prompts, where TRL is installed and onpolicy is not.

    python benchmarks/trl_side.py INPUTS STEPS OUT.json

INPUTS is made by examples/quickstart/prepare.py. OUT.json gets the times when the first rollout was
scored and when each step ended (seconds since the epoch), the rewards, and the versions. It is called
by `benchmarks/beside_trl.py`; the flags of both sides are in `benchmarks/beside_trl.md`.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, ANSWERS = 32, 8


class Stamps(TrainerCallback):
    """A callback that records the ends of steps, and their rewards."""

    def __init__(self) -> None:
        self.rollouts: list[float] = []
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def score(self, completions: list[str], label: list[str], **_: Any) -> list[float]:
        """Return the quickstart's reward, `exact`: TRL calls it when a rollout has been sampled."""
        self.rollouts.append(time.time())
        return [float(c.strip() == x) for c, x in zip(completions, label, strict=True)]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "reward" in logs:
            self.rewards.append(logs["reward"])


def settings(steps: int, directory: Path) -> GRPOConfig:
    """Return the quickstart's settings, where TRL's defaults differ."""
    return GRPOConfig(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=8,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=0,
    )


def main(inputs: Path, steps: int, out: Path) -> None:
    lines = (inputs / "data.jsonl").read_text().splitlines()
    stamps = Stamps()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(inputs / "model"),
        reward_funcs=stamps.score,
        args=settings(steps, out.with_suffix("")),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        callbacks=[stamps],
    )
    trainer.train()
    record = {
        "first_rollout": stamps.rollouts[0],
        "ends": stamps.ends,
        "rewards": stamps.rewards,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
    }
    out.write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
