"""Runs that share engines, each with adapters of its own under a name, and who asks those engines."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
import requests

from onpolicy.errors import ConfigError
from onpolicy.rollout.client import EngineClient
from onpolicy.types import Request, SamplingParams
from tests.support.serving import serving
from tests.support.train_runs import finish, run_hash, summary

pytestmark = [pytest.mark.engine, pytest.mark.runs]

LORA = ("--lora-rank", "8", "--cpu-threads", "1", "--num-rollout", "3")
RUNS = {"math": (), "code-2": ("--seed", "7", "--lr", "3e-3")}
"""What is another run's beside its name."""

SHARED = list(range(20, 90))


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """The flags that reach a server which holds adapters of all names."""
    names = "--lora-rank", "8", "--lora-names", *RUNS, "unused"
    directory = tmp_path_factory.mktemp("serve")
    with serving(checkpoint, directory, *names, "--sglang-skip-tokenizer-init") as (flags, _):
        yield flags


@pytest.fixture(scope="module")
def outputs(start, server, tmp_path_factory):
    """What the runs of all names print, which share the server at the same time."""
    under_way = {
        name: start(tmp_path_factory.mktemp(name), *LORA, *more, *server, "--lora-name", name)
        for name, more in RUNS.items()
    }
    return {name: finish(process) for name, process in under_way.items()}


@pytest.fixture
def client_of(server):
    _, url, _, key = server
    api_key = Path(key.removeprefix("@")).read_text().strip()
    return lambda name: EngineClient(url, api_key, 60.0, 60.0, "", name)


def ask(*clients):
    """Each one's response to a prompt that all tests share, asked for at the same time."""
    params = SamplingParams(temperature=1.0, max_new_tokens=32, stop_token_ids=(), ignore_eos=True)
    request = Request(prompt_ids=SHARED, sampling_seed=3, params=params)

    async def generate():
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(c.generate(session, request) for c in clients))

    return asyncio.run(generate())


def test_runs_that_share_engines_have_the_bits_of_runs_with_engines_of_their_own(
    outputs, start, tmp_path
):
    alone = finish(start(tmp_path, *LORA, *RUNS["code-2"]))
    assert [summary(output)["tokens mismatched"] for output in outputs.values()] == ["0", "0"]
    assert run_hash(outputs["math"]) != run_hash(outputs["code-2"]) == run_hash(alone)


def test_each_name_has_its_own_answers_cache_and_version(outputs, client_of):
    first = [ask(client_of(name))[0] for name in RUNS]
    again = ask(*(client_of(name) for name in [*RUNS] * 4))  # in one batch
    assert [answer.num_cached_tokens for answer in first] == [0, 0]
    assert min(answer.num_cached_tokens for answer in again) == len(SHARED) - 1
    for answer, expected in zip(again, first * 4, strict=True):
        assert answer.response_ids == expected.response_ids
        assert answer.rollout_log_probs == expected.rollout_log_probs
        assert answer.weight_version == 3
    assert first[0].rollout_log_probs[0] != first[1].rollout_log_probs[0]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, r"lora_path=None: this engine has adapters named math, code-2, unused, and no others"),
        ({"lora_path": "other"}, r"lora_path='other': this engine has adapters named math"),
        ({"lora_path": "unused"}, r"lora_path='unused': nothing was pushed under this name yet"),
        ({"lora_path": "math", "session_params": {"id": "x"}}, "session_params: "),
    ],
)
def test_a_request_is_never_answered_by_the_base_in_silence(outputs, client_of, given, rule):
    client = client_of("math")
    body = {"input_ids": SHARED, "sampling_params": {"max_new_tokens": 2}, **given}
    answer = requests.post(f"{client.url}/generate", json=body, headers=client.headers)
    assert answer.status_code == 400 and re.search(rule, answer.text)
    assert ask(client)[0].weight_version == 3


def test_a_name_that_the_server_does_not_have_is_no_runs(server, start, client_of, tmp_path):
    with pytest.raises(ConfigError, match="and the run is without --lora-name"):
        client_of("").report()
    output = finish(start(tmp_path, *LORA, *server, "--lora-name", "physics"), 2)
    assert "has adapters named math, code-2, unused, and the run is --lora-name=physics" in output
