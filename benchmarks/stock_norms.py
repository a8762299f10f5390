"""What a stock rollout's mismatch is once its norms are the trainer's: a kind swapped for real.

    python -m benchmarks.stock_norms --hf-checkpoint DIR --json FILE

takes the flags of `onpolicy explain --attribution operators --no-true-on-policy-mode`. SGLang's norm
normalises the sum with the residual before that is rounded; here it normalises the rounded sum, as the
trainer does. Where SGLang would call a kernel for AMX, that is replaced, too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from onpolicy.cli.main import main
from tests.support.after_import import after_import
from tests.support.broken_engine import IN_SERVERS
from tests.support.train_runs import ROOT

CODE = """
import torch
from sglang.srt.layers.layernorm import RMSNorm

def norm(self, x):
    squares = x.float().pow(2).mean(-1, keepdim=True)
    normed = x.float() * torch.rsqrt(squares + self.variance_epsilon)
    return (normed * self.weight).to(x.dtype)

def forward(self, x, residual=None, *_, **__):
    if residual is None:
        return norm(self, x)
    total = (x.float() + residual.float()).to(x.dtype)
    return norm(self, total), total

RMSNorm.forward_native = RMSNorm.forward_cpu = forward
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        code = after_import("sglang.srt.layers.layernorm", CODE, IN_SERVERS)
        (Path(directory) / "sitecustomize.py").write_text(code)
        os.environ["PYTHONPATH"] = os.pathsep.join((directory, str(ROOT)))
        flags = ["--attribution", "operators", "--no-true-on-policy-mode", *sys.argv[1:]]
        sys.exit(main(["explain", *flags]))
