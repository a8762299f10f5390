"""What the plug-in puts into an engine whose contract is aligned."""

import dataclasses
import importlib
import sys

import pytest

from onpolicy.ops.cpu import CpuOperators
from sglang_patches import attention, determinism, model_modules, plugin, registry, sampler
from tests.support.tiny_contract import CONTRACT, LATENT

WHOLE = dataclasses.replace(
    CONTRACT, shapes=dataclasses.replace(CONTRACT.shapes, attention=(LATENT,))
)

OF_AN_ALIGNED_ENGINE = {
    "arg_groups.model_hook.handle_model_specific_adjustments",
    "attention",
    "constrained.grammar_manager.GrammarManager.get_ready_grammar_requests",
    "constrained.grammar_manager.GrammarManager.process_req_with_grammar",
    "determinism",
    "entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response",
    "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
    "entrypoints.openai.serving_completions.OpenAIServingCompletion._build_completion_response",
    "entrypoints.openai.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
    "entrypoints.openai.serving_completions.OpenAIServingCompletion._validate_request",
    "layers.linear.RowParallelLinear.forward",
    "layers.logits_processor.LogitsMetadata.from_forward_batch",
    "layers.logits_processor.LogitsProcessor._compute_lm_head",
    "layers.logprob_processor.InputLogprobProcessor.forward",
    "layers.quantization.unquant.UnquantizedLinearMethod.apply",
    "managers.scheduler.Scheduler._get_new_batch_prefill_raw",
    "managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
    "managers.tokenizer_manager.TokenizerManager._send_one_request",
    "models.transformers.MoEMixin.recursive_replace",
    "models.transformers.TransformersBase.load_weights",
    "models.transformers.replace_rms_norm_class",
    "sampler",
    "sampling.sampling_batch_info.SamplingBatchInfo.update_regex_vocab_mask",
    "sampling.sampling_params.SamplingParams.verify",
}


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


def test_an_aligned_engine_has_every_patch(installed):
    assert installed(WHOLE) >= OF_AN_ALIGNED_ENGINE


def test_an_aligned_engine_imports_no_model_definition_but_that_of_the_transformers_backend(
    monkeypatch,
):
    monkeypatch.setenv(model_modules.LEFT_OUT, "")
    name = model_modules.REGISTRY
    package = importlib.import_module(name.rpartition(".")[0])
    monkeypatch.setattr(package, "registry", None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]  # it looks once, when it is imported
    model_modules.install()
    models = importlib.import_module(name).ModelRegistry.models
    assert {model.__module__ for model in models.values()} == {"sglang.srt.models.transformers"}
    assert models.keys() >= {"TransformersForCausalLM", "TransformersEmbeddingModel"}
