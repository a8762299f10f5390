"""Lengths that nobody asked for fit the model; others are as they were asked for."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.explain import ExplainConfig
from onpolicy.config.tools import VerifyConfig
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch import lengths
from onpolicy.run.launch.lengths import fit_run, fit_verify


@pytest.fixture
def of_context(checkpoint, monkeypatch):
    """Sets the context of the model."""

    def set_context(context):
        hf_config = load_config(str(checkpoint))
        hf_config.max_position_embeddings = context
        monkeypatch.setattr(lengths, "load_config", lambda *_: hf_config)

    return set_context


def test_a_runs_responses_leave_half_of_the_context_to_prompts(of_context):
    def response_len(context, *argv):
        of_context(context)
        return fit_run(parse(TrainConfig, argv, "x")).rollout.rollout_max_response_len

    assert response_len(2048) == 1024
    assert response_len(128) == 64
    assert response_len(128, "--rollout-max-response-len", "1024") == 1024


def test_one_from_a_file_was_asked_for(of_context, tmp_path):
    of_context(128)
    (file := tmp_path / "run.yaml").write_text("rollout_max_response_len: 1024\n")
    config = parse(TrainConfig, ["--custom-config-path", str(file)], "x")
    assert fit_run(config).rollout.rollout_max_response_len == 1024


@pytest.mark.parametrize(("config_class", "usual"), [(VerifyConfig, 64), (ExplainConfig, 24)])
def test_the_responses_of_verify_and_explain_do_too(of_context, config_class, usual):
    def new_tokens(context, *argv):
        of_context(context)
        return fit_verify(parse(config_class, argv, "x")).max_new_tokens

    assert new_tokens(256) == usual
    assert new_tokens(40) == 20
    assert new_tokens(40, "--max-new-tokens", str(usual)) == usual
