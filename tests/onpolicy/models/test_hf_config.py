import json
import shutil

import pytest
from transformers import (
    AutoConfig,
    BambaConfig,
    FalconH1Config,
    JambaConfig,
    MambaConfig,
    PaliGemmaConfig,
    Qwen3VLMoeConfig,
)

from onpolicy.errors import ConfigError
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config, require_alignable
from tests.support.tiny import ARCHITECTURES, make_checkpoint


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_complete_checkpoint_loads(checkpoint):
    assert load_config(str(checkpoint)).model_type == "qwen3"


def test_an_adapter_is_refused_and_not_said_to_be_missing(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"is an adapter .* `onpolicy export .* --merge .*give OUT"
    ):
        load_config(str(tmp_path))


def test_code_that_comes_with_a_checkpoint_is_not_run_unless_asked_for(copy):
    edit_config(copy, auto_map={"AutoConfig": "evil.Config"})
    assert load_config(str(copy)).model_type == "qwen3"
    edit_config(copy, model_type="evil", architectures=["EvilForCausalLM"])
    with pytest.raises(
        ConfigError, match=r"no class of its own for model_type=evil.*--trust-remote"
    ):
        load_config(str(copy))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_architectures_are_alignable(architecture, tmp_path):
    path = make_checkpoint(tmp_path, architecture)
    require_alignable(ModelFacts(AutoConfig.from_pretrained(path)), 256)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["BertModel"]}, "architecture=BertModel, which is not a causal"),
        ({"num_experts": 8}, "num_experts=8: none of its modules is known to hold experts"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*chunked"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0: its layers do not ask"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config=mxfp4: only weights",
        ),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ],
)
def test_what_cannot_be_aligned_is_refused_with_its_value_and_a_way_out(
    checkpoint, changes, problem
):
    config = AutoConfig.from_pretrained(checkpoint)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"{problem}.*run without --true-on-policy-mode"):
        require_alignable(ModelFacts(config), 256)


def test_a_window_that_the_layers_do_not_hand_on_is_refused_where_it_matters(tmp_path):
    config = AutoConfig.from_pretrained(make_checkpoint(tmp_path, "llama"))
    config.sliding_window = 64
    require_alignable(ModelFacts(config), 64)
    with pytest.raises(
        ConfigError, match="sliding_window=64, smaller than the longest context 256"
    ):
        require_alignable(ModelFacts(config), 256)


def test_dynamic_scaling_is_refused_beyond_the_context_in_which_it_scales_nothing(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = load_config(str(make_checkpoint(tmp_path, "llama", rope_parameters=scaling)))
    require_alignable(ModelFacts(config), 256)
    with pytest.raises(
        ConfigError, match=r"rope_type=dynamic.*=256.*serve 257 tokens.*lower --sglang"
    ):
        require_alignable(ModelFacts(config), 257)


@pytest.mark.parametrize("kind", [MambaConfig, JambaConfig, BambaConfig, FalconH1Config])
def test_state_space_models_are_refused_as_such(kind):
    config = kind(architectures=[kind.__name__.replace("Config", "ForCausalLM")])
    with pytest.raises(ConfigError, match="ForCausalLM, which has linear attention or state-space"):
        require_alignable(ModelFacts(config), 256)


@pytest.mark.parametrize("kind", [Qwen3VLMoeConfig, PaliGemmaConfig])
def test_models_whose_text_part_is_not_known_are_refused_by_name(copy, kind):
    name = kind.__name__.replace("Config", "ForConditionalGeneration")
    kind(architectures=[name]).save_pretrained(copy)
    with pytest.raises(
        ConfigError, match=rf"model_type={kind.model_type} is made of several .*vision_config"
    ):
        load_config(str(copy))
