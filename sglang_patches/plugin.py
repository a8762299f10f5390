"""Entry point `sglang.srt.plugins`: reads the contract and installs the patches that keep it."""

from __future__ import annotations

import importlib
import os

from onpolicy.compat.process import prepare_process
from onpolicy.contract import CONTRACT_VARIABLE, THREADS_VARIABLE, NumericsContract
from onpolicy.ops import make_operators
from onpolicy.ops.backends import backend_of
from sglang_patches import (
    backend_checks,
    configurations,
    cpu_sizes,
    determinism,
    embedding,
    experts,
    forks,
    harmful_requests,
    head_sizes,
    layer_attention,
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
    trainers_model,
    versions,
    weights,
)


def load() -> None:
    """Install the patches in this process; does nothing without ONPOLICY_CONTRACT."""
    text = os.environ.get(CONTRACT_VARIABLE)
    if text is None:
        return
    prepare_process()  # not every server is started by `serve`
    versions.sglang_version()
    contract = NumericsContract.from_json(text)
    shared_names.install()
    harmful_requests.install()
    status.install()
    weights.install(contract)
    if contract.device == "cpu":
        forks.install()
        cpu_sizes.install()
        routed_experts.install()
    if contract.is_aligned:
        operators = make_operators(contract, int(os.environ.get(THREADS_VARIABLE, "1")))
        determinism.install(contract)
        linear.install(operators, contract)
        importlib.import_module(backend_of(contract.backend).engine_attention).install(operators)
        layer_attention.install()
        configurations.install()
        backend_checks.install(contract)
        lm_head.install(operators)
        embedding.install()
        sampler.install(operators, contract)
        requests.install()
        request_seeds.install()
        parallel_samples.install()
        experts.install()
        head_sizes.install(contract)
        trainers_model.install()
        model.install(operators, contract)
    registry.started(contract)
