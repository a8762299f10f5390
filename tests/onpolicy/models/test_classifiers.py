"""Classifiers whose numbers would not be transformers' are refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2ForSequenceClassification

from onpolicy.config import groups
from onpolicy.config.tools import ServeConfig
from onpolicy.errors import ConfigError
from onpolicy.models.classifiers import as_decoder, is_classifier, require_rewards
from onpolicy.models.hf_config import load_config
from onpolicy.run.commands.serve import checked_spec
from tests.support.classifiers import make_classifier
from tests.support.tiny import make_checkpoint


def require(path):
    require_rewards(str(path), load_config(str(path)), False, "--reward-checkpoint")


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "mistral", "qwen3-moe"])
def test_classifiers_with_a_linear_head_are_taken(tmp_path, architecture):
    path = make_classifier(tmp_path, architecture)
    require(path)
    config = load_config(str(path))
    assert is_classifier(config) and not is_classifier(as_decoder(config))


def test_others_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"architecture=Qwen3ForCausalLM is no sequence classif"):
        require(make_checkpoint(tmp_path / "policy", "qwen3"))
    with pytest.raises(ConfigError, match=r"num_labels=3, and a reward is one number"):
        require(make_classifier(tmp_path / "three", num_labels=3))
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 137, "n_positions": 64}
    other = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=1))
    other.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="GPT2ForSequenceClassification has a head of its own"):
        require(tmp_path / "gpt2")


def test_a_head_with_a_bias_is_refused(tmp_path):
    path = make_classifier(tmp_path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file) | {"score.bias": torch.ones(1)}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"score\.bias"):
        require(path)


def test_damaged_weights_are_refused(tmp_path):
    path = make_classifier(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 16}))
    with pytest.raises(ConfigError, match=r"other shapes than config\.json says"):
        require(path)


def test_a_classifier_is_not_served_on_stock_operators(tmp_path):
    model = groups.ModelConfig(hf_checkpoint=str(make_classifier(tmp_path)))
    with pytest.raises(ConfigError, match=r"--no-true-on-policy-mode: .* is a sequence classifier"):
        checked_spec(ServeConfig(model=model, true_on_policy_mode=False))
