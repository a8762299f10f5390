"""What `--operators portable` gave on the machine that wrote `golden.json`; others are to give the same.

    PYTHONPATH=. python tests/support/golden.py          # computes all of it, says what differs
    PYTHONPATH=. python tests/support/golden.py --write  # and writes it down, where versions moved

Inputs are numbers of few bits from Python's own generator, so they are the same everywhere too.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from onpolicy.contract import PORTABLE_KERNELS
from tests.support.tiny import ALL_ARCHITECTURES, SIZES, make_tokenizer
from tests.support.train_runs import ROOT, finish, run_hash, start_train, write_prompts

FILE = Path(__file__).with_name("golden.json")

DIGESTS = """
from onpolicy.compat.process import prepare_process, use_variables_of
prepare_process()
use_variables_of("portable")
import json
import sys
from tests.support.golden import digests
print(json.dumps(digests(int(sys.argv[1]))))
"""

RUNS = {
    "dense": ("qwen3", "--dtype", "float32"),
    "experts": ("qwen3-moe", "--dtype", "bfloat16"),
    "dense on Megatron": ("qwen3", "--train-backend", "megatron"),
}
"""An architecture of `tiny.py`, and flags."""


def digests(num_threads):
    """Of operators' results, of gradients and of AdamW's steps; in a process of portable kernels."""
    from dataclasses import replace

    from onpolicy.ops import make_operators
    from onpolicy.ops.checks.self_check import self_check
    from tests.support.tiny_contract import CONTRACT, SHARED

    found = {"adamw": _digest(_learnt())}
    for contract in (CONTRACT, SHARED):
        for dtype in ("float32", "bfloat16"):
            contract = replace(contract, backend="portable", dtype=dtype)
            operators = make_operators(contract, num_threads)
            blocks = f"{dtype}, {contract.row_parallel_blocks} blocks"
            for name, digest in self_check(operators, contract).items():
                found[f"{name}, {blocks}"] = digest
            found[f"gradients, {blocks}"] = _digest(_gradients(operators, dtype))
    return found


def _digest(x):
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def _learnt():
    from onpolicy.config.groups import TrainerConfig
    from onpolicy.ops.checks.fixed_numbers import probe
    from onpolicy.training.fsdp.fsdp_optimizer import make_optimizer

    weight = torch.nn.Parameter(probe(1003, seed=31))
    optimizer = make_optimizer([weight], TrainerConfig(), portable=True)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 1e-2
        weight.grad = probe(1003, seed=32 + step)
        optimizer.step()
    return weight.detach()


def _gradients(operators, dtype):
    """Those of a linear, a norm, experts and attention."""
    from typing import Any, cast

    import torch.nn.functional as F

    from onpolicy.ops import AttentionLayout, ScoreRule
    from onpolicy.ops.checks.fixed_numbers import probe

    ops, kind = cast(Any, operators), getattr(torch, dtype)
    x, weight = probe(70, 96, seed=41).to(kind), probe(6, 1100, 96, seed=42).to(kind)
    back, norm = probe(192, 1100, seed=43).to(kind), probe(192, seed=44).to(kind)
    leaves = [t.requires_grad_() for t in (x, weight, back, norm)]
    hidden = ops.elementwise(F.silu, ops.linear(x, weight[0]))
    hidden = hidden + ops.grouped_linear(x, weight, torch.tensor([0, 9, 9, 40, 41, 69, 70]))
    rows = ops.rms_norm(ops.linear(hidden, back), norm, 1e-6).view(70, 4, 48)
    layout = AttentionLayout.packed((33, 37))
    out = ops.attention(rows, rows[:, :2], rows[:, 2:], layout, ScoreRule(scale=0.2))
    log_probs = ops.log_softmax(out.flatten(1), torch.full((70, 1), 0.7))
    (log_probs * probe(70, 192, seed=45)).sum().backward()
    return torch.cat([t.grad.float().flatten() for t in leaves if t.grad is not None])


def digests_elsewhere(num_threads, **variables):
    """`digests` in a process of its own, with these environment variables."""
    answer = subprocess.run(
        [sys.executable, "-c", DIGESTS, str(num_threads)],
        env={**bare_environment(), **variables}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    return found


def bare_environment():
    """This environment without the kernels that tests ask for."""
    kept = {k: v for k, v in os.environ.items() if k not in PORTABLE_KERNELS}
    return {**kept, "PYTHONPATH": str(ROOT)}


def make_checkpoint(directory, architecture):
    """A model of weights that bfloat16 represents, drawn by Python."""
    config_class, sizes = ALL_ARCHITECTURES[architecture]
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **sizes}))
    rng = random.Random(architecture)
    for name, tensor in model.state_dict().items():
        drawn = torch.tensor([rng.randint(-64, 64) for _ in range(tensor.numel())])
        is_norm = name.endswith("norm.weight")
        tensor.copy_(drawn.view(tensor.shape) / (128 if is_norm else 256) + is_norm)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def golden_run(name, directory, *argv, **variables):
    """The hash of one of RUNS."""
    architecture, *flags = RUNS[name]
    checkpoint = make_checkpoint(directory / "model", architecture)
    data = write_prompts(directory / "prompts.jsonl")
    process = start_train(
        checkpoint, data, directory / "trained", "--operators", "portable", "--num-rollout", "2",
        *flags, *argv, env=variables,
    )  # fmt: skip
    return run_hash(finish(process))


def expected():
    recorded = json.loads(FILE.read_text())
    return recorded


def main(write):
    os.environ.pop("MKL_CBWR", None)
    found = {"digests": digests_elsewhere(1), "runs": {}}
    with tempfile.TemporaryDirectory() as directory:
        for name in RUNS:
            found["runs"][name] = golden_run(name, Path(directory, name))
            print(name, found["runs"][name], flush=True)
    known = expected() if FILE.exists() else {"digests": {}, "runs": {}}
    for part in found:
        for name in sorted(found[part].keys() | known[part].keys()):
            if found[part].get(name) != known[part].get(name):
                print(f"{part}: {name}: {found[part].get(name)}, not {known[part].get(name)}")
    if write:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    return int(found != known)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
