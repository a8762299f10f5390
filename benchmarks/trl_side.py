"""TRL's GRPOTrainer on an example's model and prompts, where TRL is installed and onpolicy is not.

    python benchmarks/trl_side.py EXAMPLE INPUTS STEPS OUT.json

INPUTS is made by the prepare.py of EXAMPLE, quickstart or smollm2. OUT.json gets the times when
the first rollout was scored and when each step ended (seconds since the epoch), the rewards, and the
versions. It is called by `benchmarks/beside_trl.py`; `benchmarks/beside_trl.md` has the flags.
"""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ANSWERS = 8

OF_EXAMPLES = {
    "quickstart": {
        "per_device_train_batch_size": 32 * ANSWERS, "max_completion_length": 8,
        "learning_rate": 3e-4, "warmup_steps": 5, "bf16": False,
    },
    "smollm2": {  # float32 masters, computed in bfloat16, as onpolicy has them
        "per_device_train_batch_size": 8 * ANSWERS, "max_completion_length": 32,
        "learning_rate": 1e-5, "warmup_steps": 2, "bf16": True,
    },
}  # fmt: skip
"""The settings in which the examples differ, as in their config.yaml."""

BOXED, NUMBER = re.compile(r"\\boxed\{(-?\d+)\}"), re.compile(r"-?\d+")


class Stamps(TrainerCallback):
    """A callback that records the ends of steps, and their rewards."""

    def __init__(self) -> None:
        self.rollouts: list[float] = []
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def score(self, completions: list[Any], label: list[str], **_: Any) -> list[float]:
        """Return whether each answer, or a chat's last number, one in a box before others, is the label.
        TRL calls it when a rollout has been sampled."""
        self.rollouts.append(time.time())
        given = [
            c.strip() if isinstance(c, str) else _last_number(c[0]["content"]) for c in completions
        ]
        return [float(answer == x) for answer, x in zip(given, label, strict=True)]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "reward" in logs:
            self.rewards.append(logs["reward"])


def _last_number(text: str) -> str:
    return (BOXED.findall(text) or NUMBER.findall(text) or [""])[-1]


def settings(example: str, steps: int, directory: Path) -> GRPOConfig:
    """Return the example's settings, where TRL's defaults differ."""
    return GRPOConfig(
        output_dir=str(directory),
        max_steps=steps,
        num_generations=ANSWERS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        lr_scheduler_type="constant_with_warmup",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        disable_dropout=True,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=0,
        **OF_EXAMPLES[example],
    )


def main(example: str, inputs: Path, steps: int, out: Path) -> None:
    lines = (inputs / "data.jsonl").read_text().splitlines()
    stamps = Stamps()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(inputs / "model"),
        reward_funcs=stamps.score,
        args=settings(example, steps, out.with_suffix("")),
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
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
