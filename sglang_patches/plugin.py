"""Entry point `sglang.srt.plugins`: reads the contract and installs the patches that keep it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from onpolicy.compat.process import prepare_process
from onpolicy.contract import (
    CONTRACT_VARIABLE,
    OUTSIDE,
    TAPS_VARIABLE,
    THREADS_VARIABLE,
    TOKENS_VARIABLE,
    NumericsContract,
)
from onpolicy.ops import Operators, make_operators
from onpolicy.ops.backends import backend_of
from sglang_patches import (
    backend_checks,
    configurations,
    cpu_sizes,
    determinism,
    echo,
    embedding,
    experts,
    forks,
    harmful_requests,
    head_sizes,
    layer_attention,
    linear,
    lm_head,
    lm_head_bias,
    model,
    model_names,
    parallel_samples,
    prompt_log_probs,
    prompt_logprobs_field,
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
    model_names.install()
    status.install()
    weights.install(contract)
    if contract.device == "cpu":
        forks.install()
        cpu_sizes.install()
        routed_experts.install()
    taps = _taps()
    if contract.shares_model:
        operators = make_operators(contract, int(os.environ.get(THREADS_VARIABLE, "1")))
        behind = operators if taps is None else taps.behind(operators)
        _share_model(contract, behind, fuses=taps is None)
    if taps is not None:
        taps.install(by_operators=contract.shares_model)
    if (file := os.environ.get(TOKENS_VARIABLE)) is not None:
        importlib.import_module("sglang_patches.given_tokens").install(Path(file))
    registry.started(contract)


def _share_model(contract: NumericsContract, operators: Operators, *, fuses: bool) -> None:
    """Have the engine run the trainer's modelling code, by the operators of the kinds that are aligned.

    What they take the place of is looked for in the model last, when all is in it.
    """
    linear.install(operators, contract)
    layer_attention.install()
    configurations.install(contract)
    embedding.install()
    head_sizes.install(contract)
    lm_head_bias.install()
    if contract.aligns("linear", OUTSIDE):
        lm_head.install(operators)
    if contract.aligns("attention"):
        importlib.import_module(backend_of(contract.backend).engine_attention).install(operators)
        backend_checks.install(contract)
    if contract.aligns("experts"):
        experts.install()
    if contract.aligns("log_probs", OUTSIDE):
        determinism.install(contract)
        sampler.install(operators, contract)
        prompt_log_probs.install(operators, contract)
        requests.install()
        echo.install()
        prompt_logprobs_field.install()
        request_seeds.install()
        parallel_samples.install()
    trainers_model.install(contract)
    model.install(operators, contract, fuses=fuses)


def _taps() -> Any:
    """What records this engine, if it is to be recorded (`onpolicy explain`)."""
    directory = os.environ.get(TAPS_VARIABLE)
    if directory is None:
        return None
    return importlib.import_module("sglang_patches.taps").Taps(Path(directory))
