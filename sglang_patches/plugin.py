"""Entry point `sglang.srt.plugins`: reads the contract and installs the patches that keep it."""

from __future__ import annotations

import os
import pkgutil

from onpolicy.compat.process import prepare_process
from onpolicy.contract import (
    CONTRACT_VARIABLE,
    THREADS_VARIABLE,
    NumericsContract,
)
from onpolicy.ops import Operators, make_operators
from onpolicy.ops.backends import backend_of
from sglang_patches import (
    chats,
    configurations,
    cpu,
    determinism,
    embedding,
    experts,
    extensions,
    generate_each,
    grammars,
    harmful_requests,
    head_sizes,
    layer_attention,
    linear,
    lm_head,
    memory_release,
    model,
    model_modules,
    model_names,
    neutral_values,
    prefill_once,
    prompt_answers,
    prompt_log_probs,
    registry,
    request_seeds,
    requests,
    sampler,
    shared_names,
    status,
    trainers_model,
    versions,
    weights,
    who_may_ask,
)


def load() -> None:
    """Install the patches in this process; do nothing without ONPOLICY_CONTRACT."""
    text = os.environ.get(CONTRACT_VARIABLE)
    if text is None:
        return
    prepare_process()  # not every server is started by `serve`
    versions.sglang_version()
    contract = NumericsContract.from_json(text)
    shared_names.install()
    harmful_requests.install()
    who_may_ask.install()
    generate_each.install()
    model_names.install()
    chats.install()
    neutral_values.install()
    status.install()
    weights.install(contract)
    if contract.device == "cpu":
        cpu.install()
    else:
        memory_release.install()
    asked = extensions.asked_for()
    if contract.is_aligned:
        model_modules.install()
        operators = make_operators(contract, int(os.environ.get(THREADS_VARIABLE, "1")))
        for extension in asked:
            operators = extension.around(operators)
        _share_model(contract, operators, fuses=not asked)
    for extension in asked:
        extension.install(contract)
    registry.started(contract)


def _share_model(contract: NumericsContract, operators: Operators, *, fuses: bool) -> None:
    """Have the engine run the trainer's modelling code with the aligned operators.

    `model` comes last, since it aligns modules that the other patches have put in place.
    """
    linear.install(operators, contract)
    layer_attention.install()
    configurations.install(contract)
    embedding.install()
    head_sizes.install(contract)
    lm_head.install(operators)
    pkgutil.resolve_name(backend_of(contract.backend).engine_attention)(operators)
    prefill_once.install()
    if contract.device == "cpu":
        cpu.accept_attention()
    experts.install()
    determinism.install(contract)
    sampler.install(operators, contract)
    grammars.install()
    prompt_log_probs.install(operators, contract)
    requests.install()
    prompt_answers.install()
    request_seeds.install()
    trainers_model.install()
    model.install(operators, contract, fuses=fuses)
