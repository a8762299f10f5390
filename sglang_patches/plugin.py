"""Entry point `sglang.srt.plugins`: reads the contract and installs the patches that keep it."""

from __future__ import annotations

import os
import pkgutil

from onpolicy.compat.process import prepare_process
from onpolicy.contract import CONTRACT_VARIABLE, THREADS_VARIABLE, NumericsContract
from onpolicy.ops import Operators, make_operators
from onpolicy.ops.backends import backend_of
from sglang_patches import (
    chats,
    configurations,
    determinism,
    engine_experts,
    engine_grammars,
    engine_linears,
    engine_sampler,
    extensions,
    generate_each,
    head_sizes,
    layer_attention,
    layer_images,
    layer_recurrence,
    lm_head,
    model,
    neutral_values,
    platform,
    prefill_once,
    prompt_log_probs,
    pushed_weights,
    registry,
    requests,
    shared_names,
    status,
    who_may_ask,
)


def load() -> None:
    """Install the patches in this process; do nothing without ONPOLICY_CONTRACT."""
    text = os.environ.get(CONTRACT_VARIABLE)
    if text is None:
        return
    prepare_process()  # not every server is started by `serve`
    status.sglang_version()
    contract = NumericsContract.from_json(text)
    shared_names.install()
    requests.refuse_harmful()
    who_may_ask.install()
    generate_each.install()
    chats.install()
    neutral_values.install()
    status.install()
    pushed_weights.install(contract)
    configurations.serve_text_parts(contract)
    if contract.device == "cpu":
        platform.correct_for_cpu()
    else:
        platform.wait_before_release()
    asked = extensions.asked_for()
    if contract.is_aligned:
        model.leave_out_models()
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
    engine_linears.install(operators, contract)
    layer_attention.install()
    layer_recurrence.install(contract)
    layer_images.install(operators, contract)
    configurations.install(contract)
    head_sizes.install(contract)
    lm_head.install(operators)
    pkgutil.resolve_name(backend_of(contract.backend).engine_attention)(operators)
    prefill_once.install()
    if contract.device == "cpu":
        platform.accept_attention()
    engine_experts.install()
    determinism.install(contract)
    engine_sampler.install(operators, contract)
    engine_grammars.install()
    prompt_log_probs.install(operators, contract)
    requests.keep_true()
    model.install(operators, contract, fuses=fuses)
