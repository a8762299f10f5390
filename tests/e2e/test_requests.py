"""What a request can ask of a server of either contract: no value of any field ends or hangs it.

And n samples of one request are n different ones, each of which can be had alone.
"""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from onpolicy.run.launch.contracts import contract_for
from sglang_patches.requests import MOST_SAMPLES, next_seed
from tests.support.engines_fixture import make_engines, served

pytestmark = pytest.mark.engine

VOCABULARY = 137
PATIENCE = 120
"""Seconds for one answer: some values are for as many tokens as a server can hold."""

PARAMS = {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def stock(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("stock")
    pair = make_engines(checkpoint, directory)
    contract = contract_for(pair.config, pair.hf_config, aligned=False)
    spec = dataclasses.replace(pair.rollout.servers[0].spec, contract=contract)
    with served(spec, directory / "engine.log") as server:
        yield server


@pytest.fixture(scope="module", params=["aligned", "stock"])
def server(request):
    if request.param == "stock":
        return request.getfixturevalue("stock")
    return request.getfixturevalue("engines").rollout.servers[0]


def ask(server, **body):
    body = {"input_ids": [5, 6, 7], "sampling_params": PARAMS, "return_logprob": True, **body}
    headers = {"Authorization": f"Bearer {server.spec.api_key}"}
    return requests.post(f"{server.url}/generate", json=body, headers=headers, timeout=PATIENCE)


def sample(server, **params):
    answer = ask(server, sampling_params={**PARAMS, **params})
    assert answer.status_code == 200, answer.text
    answers = answer.json() if isinstance(answer.json(), list) else [answer.json()]
    return [(a["output_ids"], a["meta_info"]["output_token_logprobs"]) for a in answers]


def is_well(server):
    answer = ask(server)
    return answer.status_code == 200 and len(answer.json()["output_ids"]) == 4


TOKENS = f"token ids are integers from 0 to {VOCABULARY - 1}"

REFUSED = {
    # Each of these ended a stock server or made it useless, unless it says otherwise.
    "a negative token": ({"input_ids": [5, -1]}, rf"input_ids\[1\]=-1: {TOKENS}"),
    "a token beyond the vocabulary": ({"input_ids": [VOCABULARY]}, rf"=137: {TOKENS}"),
    "a token beyond int32": ({"input_ids": [2**40]}, TOKENS),
    "a token beyond int64": ({"input_ids": [2**70]}, "input_ids"),
    "true for a token": ({"input_ids": [True]}, rf"=True: {TOKENS}|boolean `true`, expected"),
    "a fraction for a token": ({"input_ids": [1.5]}, "input_ids"),
    "a text for a token": ({"input_ids": ["a"]}, "input_ids"),
    "a bad token in a batch": ({"input_ids": [[5], [6, 999]]}, rf"input_ids\[1\]=999: {TOKENS}"),
    "lists of lists of lists": ({"input_ids": [[[5]]]}, "input_ids"),
    "no token": ({"input_ids": []}, "input_ids cannot be empty"),
    "no token in a batch": ({"input_ids": [[5], []]}, r"input_ids=\[\]: a prompt has at least one"),
    "a top_k beyond int32": (
        {"sampling_params": {**PARAMS, "top_k": 2**40}},
        "top_k=1099511627776",
    ),
    "no sample": ({"sampling_params": {**PARAMS, "n": 0}}, "n=0: must be an integer from 1"),
    "a million samples": (
        {"sampling_params": {**PARAMS, "n": 10**6}},
        f"n=1000000: must be an integer from 1 to {MOST_SAMPLES}",
    ),
    "a fraction of tokens": (
        {"sampling_params": {"max_new_tokens": 1.5}},
        "Expected `int|`1.5`, expected i64",
    ),
    "a start before the prompt": ({"logprob_start_len": -2}, "logprob_start_len=-2: must be an"),
    "more likeliest tokens than there are": (
        {"top_logprobs_num": VOCABULARY + 1},
        f"top_logprobs_num=138: must be an integer from 0 to {VOCABULARY}",
    ),
    "log-probabilities of no token": ({"token_ids_logprob": [VOCABULARY]}, "token_ids_logprob"),
    "an unknown parameter": (
        {"sampling_params": {"hot": 1}},
        "the request cannot be read: .*hot|unknown field `hot`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_the_value_and_the_rule(server, name):
    body, message = REFUSED[name]
    answer = ask(server, **body)
    assert answer.status_code == 400
    assert re.search(message, answer.json().get("message") or answer.text)
    assert is_well(server)


NASTY = (-2, 2**31, 2**70, 1.5, "x", [], [[]], [-1], ["x"], {"x": "x"}, True)


def fields_of_a_request():
    """Every field that SGLang takes, as (whether it is a sampling parameter, name)."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    own = {"input_ids", "sampling_params", "text"}
    fields = [field.name for field in dataclasses.fields(GenerateReqInput)]
    return [
        *((False, name) for name in fields if name not in own),
        *((True, name) for name in SamplingParams.__struct_fields__),
    ]


def test_no_value_of_any_field_ends_a_server(server):
    def ask_for(changes, is_parameter):
        ask(server, **({"sampling_params": PARAMS | changes} if is_parameter else changes))

    with ThreadPoolExecutor(len(NASTY)) as pool:
        for is_parameter, name in fields_of_a_request():
            asked = [pool.submit(ask_for, {name: value}, is_parameter) for value in NASTY]
            assert all(each.result() is None for each in asked)
            assert is_well(server), name


def test_two_requests_of_one_name_at_once_do_not_end_a_server(server):
    with ThreadPoolExecutor(8) as pool:
        for asked in [pool.submit(ask, server, rid="same") for _ in range(8)]:
            asked.exception()
    assert is_well(server)


def aligned(engines):
    return engines.rollout.servers[0]


@pytest.mark.parametrize("seed", [3, 2**63 - 1])
def test_samples_of_one_request_differ_and_each_can_be_had_alone(engines, seed):
    server = aligned(engines)
    samples = sample(server, n=3, sampling_seed=seed, max_new_tokens=12)
    assert len({tuple(tokens) for tokens, _ in samples}) == 3
    for expected in samples:
        assert sample(server, sampling_seed=seed, max_new_tokens=12) == [expected]
        seed = next_seed(seed)


def test_samples_of_a_batch_have_the_seeds_of_their_own_request(engines):
    server = aligned(engines)
    params = [{**PARAMS, "n": 2, "sampling_seed": seed} for seed in (3, 4)]
    batch = ask(server, input_ids=[[5, 6, 7], [5, 6, 7]], sampling_params=params).json()
    alone = [
        sample(server, sampling_seed=own)[0][0]
        for seed in (3, 4)
        for own in (seed, next_seed(seed))
    ]
    assert [answer["output_ids"] for answer in batch] == alone


def test_samples_of_one_request_without_a_seed_differ_too(engines):
    samples = sample(aligned(engines), n=3, sampling_seed=None, max_new_tokens=12)
    assert len({tuple(tokens) for tokens, _ in samples}) == 3


def test_greedy_samples_of_one_request_are_one_sample(engines):
    samples = sample(aligned(engines), n=3, sampling_seed=None, temperature=0)
    assert len({tuple(tokens) for tokens, _ in samples}) == 1


def test_samples_of_a_stock_server_differ_of_themselves(stock):
    samples = sample(stock, n=4, max_new_tokens=24)
    assert len({tuple(tokens) for tokens, _ in samples}) == 4


def test_a_beam_search_is_no_sample(engines):
    answer = ask(aligned(engines), sampling_params={**PARAMS, "beam_width": 2})
    assert answer.status_code == 400 and "beam_width=2: not available" in answer.text
