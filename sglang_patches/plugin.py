"""Entry point `sglang.srt.plugins`: reads the contract and installs the patches that keep it."""

from __future__ import annotations

import os

from onpolicy.contract import CONTRACT_VARIABLE, THREADS_VARIABLE, NumericsContract
from onpolicy.ops import Operators, make_operators
from sglang_patches import (
    attention,
    buffers,
    cpu_sizes,
    determinism,
    experts,
    flash_attention,
    forks,
    harmful_requests,
    linear,
    lm_head,
    model,
    parallel_samples,
    registry,
    request_seeds,
    requests,
    routed_experts,
    sampler,
    shared_names,
    status,
    triton_attention,
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
    shared_names.install()
    harmful_requests.install()
    status.install()
    weights.install()
    if contract.device == "cpu":
        forks.install()
        cpu_sizes.install()
        routed_experts.install()
    if contract.is_aligned:
        operators = make_operators(contract, int(os.environ.get(THREADS_VARIABLE, "1")))
        determinism.install(contract)
        linear.install(operators, contract)
        _install_attention(contract, operators)
        lm_head.install(operators)
        sampler.install(operators, contract)
        requests.install()
        request_seeds.install()
        parallel_samples.install()
        experts.install()
        buffers.install()
        model.install(operators, contract)
    registry.started(contract)


def _install_attention(contract: NumericsContract, operators: Operators) -> None:
    if contract.backend == "cpu":
        attention.install(operators)
    elif contract.backend == "triton":
        triton_attention.install()
    else:
        flash_attention.install()
