"""One server with adapters of two names beside a mixture, which drafts, and a trainer of each."""

import asyncio
import contextlib
import dataclasses

import aiohttp
import pytest
import requests
import torch

from onpolicy.config import groups
from onpolicy.models.adapters import adapters
from onpolicy.models.expert_adapters import ExpertLowRank
from onpolicy.system.network import free_port
from tests.parity.test_negative_controls import TEMPERATURE, count_mismatches
from tests.support.engines_fixture import make_engines, make_requests, running, served
from tests.support.tiny import make_checkpoint

pytestmark = pytest.mark.engine

NAMES = ("a", "b")
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head,experts"
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
REQUESTS = make_requests(6, seed=6, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """After a push of adapters under each name that change every log-probability."""
    directory, port = tmp_path_factory.mktemp("named"), free_port("127.0.0.1")
    checkpoint = make_checkpoint(directory / "glm4-moe", "glm4-moe")
    engine = {"rollout_server_url": (f"http://127.0.0.1:{port}",), "rollout_api_key": "a-key"}
    lora = groups.LoraConfig(lora_rank=4, lora_target_modules=TARGETS)
    made = {
        name: make_engines(
            checkpoint, directory / name, "bfloat16", sglang_args=NGRAM,
            lora=dataclasses.replace(lora, lora_name=name), **engine,
        )
        for name in NAMES
    }  # fmt: skip
    spec = dataclasses.replace(made["a"].rollout._spec, adapter_name="", adapter_names=NAMES)
    with contextlib.ExitStack() as stack:
        stack.enter_context(served(spec, directory / "log", port))
        for seed, pair in enumerate(made.values()):
            stack.enter_context(running(pair))
            torch.manual_seed(seed)
            with torch.no_grad():
                for adapter in adapters(pair.trainer.policy.module):
                    for name, factor in adapter.named_parameters():
                        if name.endswith("B"):
                            factor.to_local().normal_(std=0.02)
            pair.push_weights(1)
        yield made


def generate(*pairs):
    """What the names' requests are answered, of each pair, all asked for at the same time."""

    async def ask():
        async with aiohttp.ClientSession() as session:
            asked = [
                pair.rollout.clients[0].generate(session, request)
                for request in REQUESTS
                for pair in pairs
            ]
            answers = await asyncio.gather(*asked)
            return [answers[i :: len(pairs)] for i in range(len(pairs))]

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def answers(pairs):
    """Those of both names, beside each other."""
    return dict(zip(NAMES, generate(*pairs.values()), strict=True))


def tokens(completions):
    return [(c.response_ids, c.rollout_log_probs) for c in completions]


def test_rows_of_two_names_and_their_drafts_have_the_bits_of_their_own_trainers(pairs, answers):
    for name in NAMES:
        assert count_mismatches(pairs[name], REQUESTS, answers[name]) == 0
    again = generate(*pairs.values())
    assert [tokens(of_name) for of_name in again] == [tokens(answers[name]) for name in NAMES]
    assert sum(taken for c in again[0] + again[1] for _, taken in [c.drafts]) > 20


def test_rows_beside_those_of_another_name_have_the_bits_that_they_have_alone(pairs, answers):
    (alone,) = generate(pairs["b"])
    assert tokens(alone) == tokens(answers["b"])


def test_another_names_answers_are_found(pairs, answers):
    assert count_mismatches(pairs["a"], REQUESTS, answers["b"]) > 0


@pytest.mark.parametrize("of", ["linear", "experts", "head"])
def test_an_adapter_of_a_name_that_is_left_out_is_found(pairs, answers, of):
    every = list(adapters(pairs["a"].trainer.policy.module))
    experts = next(adapter for adapter in every if isinstance(adapter, ExpertLowRank))
    left_out = {"linear": every[0], "experts": experts, "head": every[-1]}[of]
    left_out.is_on = False
    try:
        assert count_mismatches(pairs["a"], REQUESTS, answers["a"]) > 0
    finally:
        left_out.is_on = True


def test_prompts_of_several_names_have_their_own_log_probabilities(pairs):
    client, prompts = pairs["a"].rollout.clients[0], [r.prompt_ids for r in REQUESTS[:3]]

    def scored(prompts, names):
        body = {
            "input_ids": prompts,
            "lora_path": names,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = requests.post(f"{client.url}/generate", json=body, headers=client.headers).json()
        return [each["meta_info"]["input_token_logprobs"] for each in answer]

    together = scored([*prompts, *prompts], [*"aba", *"bab"])
    alone = [scored([p], [n])[0] for p, n in zip(prompts * 2, "ababab", strict=True)]
    assert together == alone
    assert all(x != y for x, y in zip(together[:3], together[3:], strict=True))
