"""What the plug-in puts into an engine, by the kinds of operators that its contract aligns."""

import dataclasses
import importlib
import sys

import pytest

from onpolicy.contract import KINDS, OUTSIDE, PACKED_VARIABLE
from onpolicy.ops.cpu import CpuOperators
from sglang_patches import (
    attention,
    determinism,
    experts,
    model_modules,
    plugin,
    registry,
    sampler,
)
from tests.support.tiny_contract import CONTRACT, LATENT

WHOLE = dataclasses.replace(
    CONTRACT, shapes=dataclasses.replace(CONTRACT.shapes, attention=(LATENT,))
)

OF_KINDS = {
    "linear": {
        "layers.quantization.unquant.UnquantizedLinearMethod.apply",
        "layers.linear.RowParallelLinear.forward",
        "layers.logits_processor.LogitsProcessor._compute_lm_head",
        "models.transformers.EmbeddingMixin.__init__",
    },
    "attention": {
        "attention",
        "managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "arg_groups.model_hook.handle_model_specific_adjustments",
    },
    "norm": {"models.transformers.replace_rms_norm_class"},
    "experts": {
        "models.transformers.MoEMixin.recursive_replace",
        "models.transformers.TransformersBase.load_weights",
    },
    "log_probs": {
        "sampler",
        "determinism",
        "constrained.grammar_manager.GrammarManager.process_req_with_grammar",
        "constrained.grammar_manager.GrammarManager.get_ready_grammar_requests",
        "sampling.sampling_batch_info.SamplingBatchInfo.update_regex_vocab_mask",
        "sampling.sampling_params.SamplingParams.verify",
        "entrypoints.openai.serving_completions.OpenAIServingCompletion._validate_request",
        "entrypoints.openai.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
        "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "entrypoints.openai.serving_completions.OpenAIServingCompletion._build_completion_response",
        "entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response",
        "layers.logits_processor.LogitsMetadata.from_forward_batch",
        "layers.logprob_processor.InputLogprobProcessor.forward",
        "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._maybe_collect_customized_info",
        "managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "managers.tokenizer_manager.TokenizerManager._send_one_request",
        "speculative.spec_info.SpeculativeAlgorithm.create_worker",
        "mem_cache.allocation.assign_req_to_token_pool_func",
        "mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
    },
}
"""What comes with one kind alone; rotary and activation are functions of the model's own modules."""


@pytest.fixture
def installed(monkeypatch):
    """Asks for the patches of a contract, and applies none."""

    def install(contract):
        asked = set()
        monkeypatch.setattr(
            registry, "hook", lambda target, *_: asked.add(target.removeprefix("sglang.srt."))
        )
        for module in (attention, sampler, determinism):  # they register with SGLang itself
            name = module.__name__.rpartition(".")[2]
            monkeypatch.setattr(module, "install", lambda *_, name=name: asked.add(name))
        for module in (plugin.configurations,):
            monkeypatch.setattr(module, "install", lambda _: None)
        plugin._share_model(contract, CpuOperators(1), fuses=True)
        return asked

    return install


def test_an_aligned_engine_imports_no_model_definition_but_that_of_the_transformers_backend(
    monkeypatch,
):
    monkeypatch.setenv(model_modules.LEFT_OUT, "")
    name = f"{model_modules.PACKAGE}.registry"
    package = importlib.import_module(model_modules.PACKAGE)
    monkeypatch.setattr(package, "registry", None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]  # it looks once, when it is imported
    model_modules.install()
    models = importlib.import_module(name).ModelRegistry.models
    assert {model.__module__ for model in models.values()} == {"sglang.srt.models.transformers"}
    assert models.keys() >= {"TransformersForCausalLM", "TransformersEmbeddingModel"}


def test_every_kind_has_the_patches_of_the_whole_contract(installed):
    assert installed(dataclasses.replace(WHOLE, kinds=KINDS)) == installed(WHOLE)


OF_NO_LAYER = OF_KINDS["log_probs"] | {
    "layers.logits_processor.LogitsProcessor._compute_lm_head",
    "models.transformers.EmbeddingMixin.__init__",
}


def test_layers_have_the_patches_of_the_whole_contract_less_those_of_no_layer(installed):
    """And one that finds the norms of SGLang's own layers before it replaces them."""
    finds_norms = {"models.transformers.TransformersBase.recursive_replace"}
    every = installed(dataclasses.replace(WHOLE, layers=("0", "1", OUTSIDE)))
    assert every == installed(WHOLE) | finds_norms
    assert every - installed(dataclasses.replace(WHOLE, layers=("0", "1"))) == OF_NO_LAYER


def test_whole_tensors_are_rounded_before_experts_take_theirs(installed, monkeypatch):
    """SGLang calls the hook that was registered last first."""
    monkeypatch.setenv(PACKED_VARIABLE, "1")
    registered = []
    installed(WHOLE)
    monkeypatch.setattr(registry, "hook", lambda *given: registered.append(given))
    plugin._share_model(
        dataclasses.replace(WHOLE, weight_format="int4"), CpuOperators(1), fuses=True
    )
    around = [function for target, function, _ in registered if target == experts.LOAD_TARGET]
    assert len(around) == 2 and around[0] is experts._load


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_comes_with_its_own_patches_on_top_of_the_models(installed, kind):
    of_model = installed(dataclasses.replace(WHOLE, kinds=("model",)))
    added = installed(dataclasses.replace(WHOLE, kinds=("model", kind))) - of_model
    assert added == OF_KINDS.get(kind, set())
    assert not of_model & set().union(*OF_KINDS.values())
