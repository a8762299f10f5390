"""A model inside SGLang: what is imported for it, its longest prefill, and its rotary frequencies, which
are those of a model that was built on a CPU."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from transformers import AutoModel

from onpolicy.errors import ContractError
from onpolicy.models.empty import empty_causal_lm
from sglang_patches import model as model_modules
from sglang_patches.model import longest_prefill, trainers_model, use_cpu_buffers
from tests.support.tiny import ARCHITECTURES, SIZES


@pytest.mark.parametrize(("chunk", "longest"), [(8192, 8192), (-1, 16384), (None, 16384)])
def test_the_longest_prefill_is_what_sglang_resolved(monkeypatch, chunk, longest):
    resolved = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: resolved)
    assert longest_prefill() == longest


def test_an_aligned_engine_imports_no_model_definition_but_that_of_the_transformers_backend(
    monkeypatch,
):
    monkeypatch.setenv(model_modules.LEFT_OUT, "")
    name = model_modules.REGISTRY
    package = importlib.import_module(name.rpartition(".")[0])
    monkeypatch.setattr(package, "registry", None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]  # it looks once, when it is imported
    model_modules.leave_out_models()
    models = importlib.import_module(name).ModelRegistry.models
    assert {model.__module__ for model in models.values()} == {"sglang.srt.models.transformers"}
    assert models.keys() >= {"TransformersForCausalLM", "TransformersEmbeddingModel"}


def engine_model(architecture):
    config_class, sizes = ARCHITECTURES[architecture]
    config = config_class(**{**SIZES, **sizes})
    config._attn_implementation = "sdpa"
    return AutoModel.from_config(config)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_frequencies_that_another_device_rounded_otherwise_are_put_right(architecture):
    model = engine_model(architecture)
    frequencies = model.rotary_emb.inv_freq
    frequencies.copy_(torch.nextafter(frequencies, torch.full_like(frequencies, 9.0)))
    trainers = empty_causal_lm(model.config, trust_remote_code=False).base_model.rotary_emb.inv_freq
    assert not torch.equal(frequencies, trainers)
    use_cpu_buffers(model, trainers_model(model.config))
    assert torch.equal(model.rotary_emb.inv_freq, trainers)
    assert frequencies is model.rotary_emb.inv_freq  # written in place: a graph may hold it


def test_a_buffer_that_a_checkpoint_brought_stays_as_it_was_loaded():
    model = engine_model("glm4-moe")
    correction = model.layers[1].mlp.gate.e_score_correction_bias.fill_(0.3)
    use_cpu_buffers(model, trainers_model(model.config))
    assert torch.equal(correction, torch.full_like(correction, 0.3))


def test_the_engines_attention_stays_its_own():
    model = engine_model("qwen3")
    use_cpu_buffers(model, trainers_model(model.config))
    assert model.config._attn_implementation == "sdpa"


def test_a_buffer_of_another_dtype_is_refused():
    model = engine_model("qwen3").to(torch.bfloat16)
    with pytest.raises(ContractError, match=r"buffer=rotary_emb.inv_freq.*torch.float32"):
        use_cpu_buffers(model, trainers_model(model.config))
