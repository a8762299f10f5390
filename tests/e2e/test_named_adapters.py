"""Runs that share engines, each with adapters of its own under a name, and who asks those engines."""

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest
import requests

from onpolicy.cli.main import main
from onpolicy.errors import ConfigError
from onpolicy.outputs.metrics import read_jsonl
from onpolicy.rollout.client import EngineClient
from onpolicy.trajectory import FinishReason
from onpolicy.types import Request, SamplingParams
from tests.support.serving import serving
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import ROOT, TWO_RANKS, finish, journal_of, run_hash, summary

pytestmark = [pytest.mark.engine, pytest.mark.runs]

ROUNDED = ("--rollout-weight-format", "int4")
SHAPE = ("--lora-rank", "8", "--lora-dora", *ROUNDED)
LORA = (*SHAPE, "--cpu-threads", "1", "--num-rollout", "3", "--row-parallel-blocks", "2")
AGENT = (
    *LORA, "--custom-generate-function-path", "own_agent.act", "--rollout-max-context-len", "120",
    "--train-backend", "megatron", "--rollout-schedule", "free", "--max-staleness", "2",
)  # fmt: skip
NAMES = ("math", "code-2")

SHARED = list(range(20, 90))


@pytest.fixture(scope="module")
def servers(checkpoint, tmp_path_factory):
    """The flags that reach two servers of two ranks each, which hold adapters of all names."""
    names = *SHAPE, "--lora-names", *NAMES, "unused"
    several = "--rollout-num-engines", "2", "--sglang-tp-size", "2"
    with serving(checkpoint, tmp_path_factory.mktemp("serve"), *names, *several) as (flags, _):
        yield flags


@pytest.fixture(scope="module")
def evaluated(data):
    """What the run of code-2 is, whoever serves it."""
    evaluates = ("--eval-interval", "3", "--eval-prompt-data", str(data))
    return (*LORA, "--seed", "7", "--lr", "3e-3", "--rollout-lag", "1", *evaluates)


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Where it saves."""
    return tmp_path_factory.mktemp("save")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Where the runs of all names are."""
    return {name: tmp_path_factory.mktemp(name) for name in NAMES}


@pytest.fixture(scope="module")
def outputs(start, servers, evaluated, save, directories):
    """What the runs of all names print, which share the servers at the same time: one is an agent's."""
    argv = {
        "math": AGENT,
        "code-2": (*evaluated, *TWO_RANKS, "--save", str(save), "--save-interval", "1"),
    }
    under_way = {
        name: start(directories[name], *argv[name], *servers, "--lora-name", name) for name in NAMES
    }
    return {name: finish(process) for name, process in under_way.items()}


@pytest.fixture
def client_of(servers):
    _, url, _, _, key = servers
    api_key = Path(key.removeprefix("@")).read_text().strip()
    return lambda name: EngineClient(url, api_key, 60.0, 60.0, "", name)


def ask(*clients, max_new_tokens=32, aborted=()):
    """Each one's response to a prompt that all tests share, asked for at the same time; some clients
    abort what they sample."""
    params = SamplingParams(
        temperature=1.0, max_new_tokens=max_new_tokens, stop_token_ids=(), ignore_eos=True
    )
    request = Request(prompt_ids=SHARED, sampling_seed=3, params=params)

    async def generate():
        async with aiohttp.ClientSession() as session:
            asked = asyncio.gather(*(c.generate(session, request, True) for c in clients))
            aborts = [asyncio.create_task(c.abort_when(lambda: True, session)) for c in aborted]
            answers = await asked
            for task in aborts:
                task.cancel()
            return answers

    return asyncio.run(generate())


def test_runs_that_share_engines_have_the_bits_of_runs_with_engines_of_their_own(
    outputs, start, evaluated, directories, tmp_path
):
    """Though the trainer, and each server, have two ranks there and one here; one samples ahead, and one
    freely, which is repeated here."""
    replay = ("--replay", str(journal_of(directories["math"])))
    alone = {
        "math": start(tmp_path / "math", *AGENT, *replay),
        "code-2": start(tmp_path / "code-2", *evaluated),
    }
    for name, process in alone.items():
        assert summary(outputs[name])["tokens mismatched"] == "0"
        assert run_hash(finish(process)) == run_hash(outputs[name])
    assert run_hash(outputs["math"]) != run_hash(outputs["code-2"])


def test_a_run_that_is_resumed_under_its_name_ends_as_the_undisturbed_one(
    outputs, start, servers, evaluated, save, tmp_path
):
    argv = (*evaluated, *servers, "--lora-name", "code-2")
    output = finish(start(tmp_path, *argv, "--load", str(save / "step_000001")))
    assert "resumed from" in output and summary(output)["tokens mismatched"] == "0"
    assert run_hash(output) == run_hash(outputs["code-2"])


@pytest.fixture
def eval_of(servers, checkpoint, data, monkeypatch, tmp_path, capsys):
    """What `onpolicy eval` says, with the sets of the run of code-2, of what the servers hold."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/e2e"))

    def evaluate(*argv, base=checkpoint):
        flags = (*SHAPE, "--row-parallel-blocks", "2", "--seed", "7")
        flags += ("--rollout-max-response-len", "24")
        reward = ("--custom-rm-path", "own_reward.score", "--eval-prompt-data", str(data))
        given = (*flags, *reward, *servers, "--run-dir", str(tmp_path / "run"), *argv)
        code = main(["eval", str(base), *given])
        said = capsys.readouterr()
        return json.loads(said.out) if code == 0 else said.err

    return evaluate


def test_what_servers_hold_under_a_name_is_evaluated_to_the_numbers_of_its_run(
    outputs, eval_of, directories
):
    records = read_jsonl(directories["code-2"] / "run" / "metrics.jsonl")
    first, last = (record for record in records if "eval/avg@1" in record)
    report = eval_of("--lora-name", "code-2")
    assert report["rollouts_done"] == last.pop("step") == 3
    assert report["metrics"] == last != first
    other = eval_of("--lora-name", "math")
    assert other["metrics"] != last and other["weights"] != report["weights"]


def test_another_model_and_a_name_without_a_policy_are_not_evaluated(outputs, eval_of, tmp_path):
    said = eval_of("--lora-name", "unused")
    assert "--lora-name=unused: nothing was pushed under this name yet" in said
    assert "has adapters named math, code-2, unused" in eval_of("--lora-name", "physics")
    assert "contract=" in eval_of("--lora-name", "math", "--lora-rank", "4")
    other = make_checkpoint(tmp_path / "other", initializer_range=0.03)
    assert "is not the base of --lora-name=math" in eval_of("--lora-name", "math", base=other)


def test_each_name_has_its_own_answers_cache_and_version(outputs, client_of):
    first = [ask(client_of(name))[0] for name in NAMES]
    again = ask(*(client_of(name) for name in NAMES * 4))  # in one batch
    assert [answer.num_cached_tokens for answer in first] == [0, 0]
    assert min(answer.num_cached_tokens for answer in again) == len(SHARED) - 1
    for answer, expected in zip(again, first * 4, strict=True):
        assert answer.response_ids == expected.response_ids
        assert answer.rollout_log_probs == expected.rollout_log_probs
        assert answer.weight_version == 3
    assert first[0].rollout_log_probs[0] != first[1].rollout_log_probs[0]


def test_a_run_aborts_what_is_sampled_under_its_name_and_nothing_else(outputs, client_of):
    math, code = (client_of(name) for name in NAMES)
    (whole,) = ask(code, max_new_tokens=180)
    parts = ask(math, code, math, max_new_tokens=180, aborted=[math])
    assert [part.finish_reason for part in parts] == [
        FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT,
    ]  # fmt: skip
    assert parts[1].rollout_log_probs == whole.rollout_log_probs
    assert len(parts[0].response_ids) < 180


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


def test_a_name_that_the_server_does_not_have_is_no_runs(servers, start, client_of, tmp_path):
    with pytest.raises(ConfigError, match="and the run is without --lora-name"):
        client_of("").report()
    output = finish(start(tmp_path, *LORA, *servers, "--lora-name", "physics"), 2)
    assert "has adapters named math, code-2, unused, and the run is --lora-name=physics" in output
