"""Entry point `sglang.srt.plugins`: reads the contract and installs the patches that keep it."""

from __future__ import annotations

import os

from onpolicy.contract import CONTRACT_VARIABLE, THREADS_VARIABLE, NumericsContract
from onpolicy.ops import make_operators
from sglang_patches import (
    attention,
    cpu_sizes,
    determinism,
    linear,
    lm_head,
    model,
    registry,
    requests,
    routed_experts,
    sampler,
    status,
    versions,
    weights,
)


def load() -> None:
    """Install the patches in this process; does nothing without ONPOLICY_CONTRACT."""
    text = os.environ.get(CONTRACT_VARIABLE)
    if text is None:
        return
    versions.sglang_version()
    contract = NumericsContract.from_json(text)
    status.install()
    weights.install()
    if contract.device == "cpu":
        cpu_sizes.install()
        routed_experts.install()
    if contract.is_aligned:
        operators = make_operators(contract, int(os.environ.get(THREADS_VARIABLE, "1")))
        determinism.install()
        linear.install(operators)
        attention.install(operators)
        lm_head.install(operators)
        sampler.install(operators)
        requests.install()
        model.install(operators, contract)
    registry.started(contract)
