"""Run directories as `onpolicy train` leaves them, with made-up but plausible numbers."""

import json
import math
import random

from onpolicy.config import TrainConfig

HOSTILE = "</script><script>throw 'injected'</script><img src=x onerror=\"throw 'injected'\">"


def write_run(directory, records, moves=None, **config):
    """Write a run directory; `config` are the values that differ from the defaults."""
    directory.mkdir(parents=True)
    values = {**TrainConfig().to_dict(), "run_dir": str(directory), **config}
    (directory / "config.json").write_text(json.dumps(values))
    for name, lines in (("metrics", records), ("governor", moves)):
        if lines is not None:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (directory / f"{name}.jsonl").write_text(text)
    return str(directory)


def aligned_run(directory, seed, num_rollouts=60):
    records = _training(seed, num_rollouts, ceiling=0.82)
    for record in records:
        record |= {"parity/num_mismatched_tokens": 0, "train/k3_kl": 0.0}
    records += _evaluations(num_rollouts, ceiling=0.82)
    return write_run(directory, records, seed=seed, true_on_policy_mode=True)


def stock_run(directory, seed, num_rollouts=60):
    """Its mismatch grows, and one gradient is not a number."""
    records = _training(seed, num_rollouts, ceiling=0.6)
    for record in records:
        _add_mismatch(record, random.Random(f"{seed} {record['step']}"))
    records[num_rollouts // 2]["train/grad_norm"] = math.nan
    records += _evaluations(num_rollouts, ceiling=0.6)
    return write_run(directory, records, seed=seed)


def governed_run(directory, seed=1, num_rollouts=60):
    """A governor moves it twice; the reason of the second move tries to run a script."""
    records = _training(seed, num_rollouts, ceiling=0.74)
    for record in records:
        step, chance = record["step"], random.Random(f"{seed} {record['step']}")
        _add_mismatch(record, chance)
        record["governor/rung"] = (step >= 18) + (step >= 37)
        record["dc/lambda"] = min(1.0, 0.2 + step / 70)
        record["lr_decay/scale"] = 1.0 if step < 37 else 0.5
        record["train/lr"] *= record["lr_decay/scale"]
        if step >= 18:
            record["correction/tis_clipped_fraction"] = 0.02 + chance.random() * 0.01
            record["correction/mis_masked_fraction"] = 0.004 + chance.random() * 0.002
    records += _evaluations(num_rollouts, ceiling=0.74)
    moves = [
        {"step": 18, "from": "plain", "to": "tis", "reason": "k3 over 0.002 for 3 rollouts"},
        {"step": 37, "from": "tis", "to": "tis+decay", "reason": f"ESS below 0.9 {HOSTILE}"},
    ]
    return write_run(directory, records, moves, seed=seed, lr=2e-6)


def _training(seed, num_rollouts, ceiling):
    chance = random.Random(f"{seed} {ceiling}")
    records = []
    for step in range(num_rollouts):
        records.append({
            "step": step,
            "rollout/raw_reward": _learned(ceiling, step) + chance.gauss(0, 0.025),
            "rollout/response_length": 180 + 2.5 * step + chance.gauss(0, 9),
            "rollout/truncated_ratio": max(0.0, 0.2 - step / 400 + chance.gauss(0, 0.01)),
            "parity/num_compared_tokens": 50_000 + chance.randrange(9_000),
            "train/grad_norm": 0.4 + 0.5 * math.exp(-step / 15) + abs(chance.gauss(0, 0.06)),
            "train/lr": 1e-6 * min(1.0, (step + 1) / 8),
            "train/entropy": 0.35 + 0.4 * math.exp(-step / 30) + chance.gauss(0, 0.008),
            "perf/rollout_tokens_per_second": 5_400 + chance.gauss(0, 150),
        })  # fmt: skip
    return records


def _evaluations(num_rollouts, ceiling):
    return [
        {"step": step, "eval/avg@1": _learned(ceiling, step), "eval/pass@1": 0.9}
        for step in range(0, num_rollouts, 10)
    ]


def _learned(ceiling, step):
    return ceiling * (1 - math.exp(-(step + 2) / 18))


def _add_mismatch(record, chance):
    size = 1.04 ** record["step"] * math.exp(chance.gauss(0, 0.2))
    record |= {
        "parity/num_mismatched_tokens": 21_000 + chance.randrange(4_000),
        "mismatch/k3": 4e-4 * size,
        "mismatch/ess": 1 - 0.004 * size,
        "mismatch/log_ppl_abs_diff": 0.002 * size,
    }
