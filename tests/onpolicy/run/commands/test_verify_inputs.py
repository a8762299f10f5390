"""What `onpolicy verify` runs on models of any context, and `onpolicy serve` refuses."""

import dataclasses

import pytest

from onpolicy.config.groups import EngineCountConfig, ModelConfig, SessionsConfig
from onpolicy.config.tool_flags import ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.run.commands.random_prompts import make_prompts
from onpolicy.run.commands.served_engines import checked_spec, needs_of_servers
from onpolicy.run.commands.verification import (
    CHUNKS,
    LONGEST_PROMPT,
    SHORTEST_CHUNK,
    check_inputs,
    chunk_size,
    longest_prompt,
    make_train_config,
)
from onpolicy.run.launch import memory


def config_of(path="", **values):
    return VerifyConfig(model=ModelConfig(hf_checkpoint=str(path)), max_new_tokens=20, **values)


@pytest.mark.parametrize(
    ("context", "asked", "expected"),
    [(40960, None, LONGEST_PROMPT), (256, None, 234), (40960, 4000, 4000), (256, 234, 234)],
)
def test_the_longest_prompt_is_what_was_asked_or_fits(context, asked, expected, checkpoint):
    hf_config = load_config(str(checkpoint))
    hf_config.max_position_embeddings = context
    assert longest_prompt(config_of(max_prompt_len=asked), hf_config) == expected


@pytest.mark.parametrize(
    ("context", "asked", "message"),
    [
        (256, 235, r"--max-prompt-len=235: .*context of 256\. At most 234 fit"),
        (29, None, r"--max-new-tokens=20: does not fit the model's context of 29"),
    ],
)
def test_what_does_not_fit_the_context_is_refused(context, asked, message, checkpoint):
    hf_config = load_config(str(checkpoint))
    hf_config.max_position_embeddings = context
    with pytest.raises(ConfigError, match=message):
        longest_prompt(config_of(max_prompt_len=asked), hf_config)


@pytest.mark.parametrize("longest", [60, 234, 1024, 4000])
def test_prompts_span_chunks_and_share_prefixes(longest):
    prompts = [p.prompt_ids for p in make_prompts(config_of(num_prompts=12), 5000, longest)]
    assert max(map(len, prompts)) == len(prompts[0]) == longest
    assert chunk_size(longest) == max(SHORTEST_CHUNK, -(-longest // CHUNKS))
    assert longest > 2 * chunk_size(longest)
    assert any(a[:5] == b[:5] for i, a in enumerate(prompts) for b in prompts[:i])


def test_the_run_recomputes_activations_and_takes_flags_of_the_users(checkpoint):
    config = make_train_config(config_of(checkpoint), longest=1000)
    assert config.trainer.activation_checkpointing
    assert config.sglang_args == ("--chunked-prefill-size", "200")
    given = ("--chunked-prefill-size=9",)
    assert make_train_config(config_of(checkpoint, sglang_args=given), 1000).sglang_args == given


def test_what_does_not_fit_this_host_is_refused_before_anything_starts(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    with pytest.raises(
        ConfigError, match=r"memory=\d.* GiB together: this host has 1\.00 GiB free"
    ):
        check_inputs(config_of(checkpoint, run_dir=str(tmp_path)))


@pytest.fixture
def config(checkpoint):
    return ServeConfig(model=ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"))


def test_servers_that_do_not_fit_the_memory_are_refused_with_the_sum(config, monkeypatch):
    spec = checked_spec(config)
    (one,) = needs_of_servers(config, spec).held(0, 1)
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * one.bytes)
    two, three = (
        dataclasses.replace(config, engines=EngineCountConfig(rollout_num_engines=n))
        for n in (2, 3)
    )
    checked_spec(two)
    with pytest.raises(ConfigError, match=r"^memory=.* GiB together: .*3 x SGLang server: "):
        checked_spec(three)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gateway_host": "no.such.host.invalid"}, r"^--gateway-host=no.such.*can listen there"),
        ({"tool_call_parser": "none such"}, r"^--tool-call-parser=none such: SGLang has no such"),
    ],
)
def test_sessions_that_cannot_be_served_are_refused_before_anything_starts(config, given, says):
    gateway = SessionsConfig(sessions=True, **given)
    with pytest.raises(ConfigError, match=says):
        checked_spec(dataclasses.replace(config, gateway=gateway))
