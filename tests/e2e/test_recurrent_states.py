"""States of recurrent layers on a real server: few slots, many requests, and the trainer's bits.

What others met is tried here: a freed slot whose old state a new request read (vllm-project/
tpu-inference#2431), a cache hit that gave other bits than a miss (sgl-project/sglang#33515), also
where it leaves one token to compute (#29633), states lost between the chunks of a prompt (syv-ai/
qwen38-27b-rtx3090#43), and slots lost with requests that were aborted in the queue
(sgl-project/sglang#20182).
"""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from onpolicy.parity import compare_log_probs
from onpolicy.run.launch.engine_specs import STATES, make_rollout_group
from tests.support.engines_fixture import make_engines, make_requests, nudge, running
from tests.support.recurrent_engines import Retracting, RoundedStates
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import finish, metrics_of, start_train

pytestmark = pytest.mark.engine

RUNNING = 4
"""Requests that run at once."""

TOKENS = 480
"""The tokens of the cache, which evicts to make room."""


def test_a_run_trains_on_its_own_samples_and_compares_every_token(data, tmp_path):
    """A mixture of experts with recurrent layers; its server has ended before the next one starts."""
    path = make_checkpoint(tmp_path / "model", "qwen3-next")
    finish(start_train(path, data, tmp_path, "--num-rollout", "2"))
    steps = metrics_of(tmp_path)
    assert len(steps) == 2
    for step in steps:
        assert step["parity/num_compared_tokens"] > 100
        assert step["parity/num_mismatched_tokens"] == step["train/k3_kl"] == 0
        assert step["train/grad_norm"] > 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def engines(directory):
    path = make_checkpoint(directory / "model", "qwen3.5")
    flags = "--max-mamba-cache-size", str(STATES * RUNNING), "--max-total-tokens", str(TOKENS)
    given = {RoundedStates: str(directory / "rounded"), Retracting: "20"}
    named = {f"{kind.__module__}:{kind.__name__}": text for kind, text in given.items()}
    make = partial(make_rollout_group, extensions=named)
    with running(make_engines(path, directory, make_rollout=make, sglang_args=flags)) as pair:
        yield pair


@pytest.fixture
def client(engines):
    """The client of a server that is the same afterwards: a dead one would be started again."""
    client = engines.rollout.clients[0]
    instance = client.report()["instance"]
    yield client
    client.flush_cache()  # with which SGLang compares free slots and pages with all there are
    assert client.report()["instance"] == instance


def num_mismatched(engines, asked, completions):
    """Tokens whose log-probability is another in the trainer."""
    scored = engines.trainer.log_probs(
        [[*r.prompt_ids, *c.response_ids] for r, c in zip(asked, completions, strict=True)],
        [len(request.prompt_ids) for request in asked],
        1.0,
    )
    sampled = torch.tensor([x for c in completions for x in c.rollout_log_probs])
    return compare_log_probs(torch.cat(scored), sampled)[0].num_mismatched


def request_of(length, seed=1, **changes):
    (request,) = make_requests(1, seed=seed)
    prompt = [(seed * 31 + 7 * i + i * i) % 130 + 2 for i in range(length)]
    return dataclasses.replace(request, prompt_ids=prompt, **changes)


def test_more_requests_than_slots_have_the_trainers_bits_whatever_was_in_a_slot(engines, client):
    """Their prompts share prefixes, and some take several chunks."""
    asked = make_requests(20, seed=6)
    completions = engines.generate(asked)
    assert num_mismatched(engines, asked, completions) == 0
    assert sum(completion.num_cached_tokens for completion in completions) > 0


def test_a_request_that_is_retracted_goes_on_with_the_trainers_bits(engines, client, directory):
    asked = [request_of(20 + i, seed=i) for i in range(RUNNING)]
    completions = engines.generate(asked)
    assert "#retracted_reqs: 1" in (directory / "logs" / "engine_0.log").read_text()
    assert num_mismatched(engines, asked, completions) == 0


# A chunk of a prefill has 48 tokens, one of the rule 64.
@pytest.mark.parametrize("length", [2, 64, 65, 97, 144])
def test_a_cached_prefix_gives_the_bits_of_a_computed_one(engines, client, length):
    first = request_of(length, seed=length)
    (computed,) = engines.generate([first])
    next_turn = dataclasses.replace(first, prompt_ids=[*first.prompt_ids, *computed.response_ids])
    further = dataclasses.replace(next_turn, prompt_ids=[*next_turn.prompt_ids, 5, 6, 7])
    asked = [first, next_turn, further]
    cached = [engines.generate([each])[0] for each in asked]
    client.flush_cache()
    again = [engines.generate([each])[0] for each in reversed(asked)][::-1]
    assert [each.rollout_log_probs for each in cached] == [x.rollout_log_probs for x in again]
    assert cached[0].rollout_log_probs == computed.rollout_log_probs
    # Of a request all is left but its last token, whose own pass never came, and its prompt.
    left = len(next_turn.prompt_ids) - 1
    assert [each.num_cached_tokens for each in cached] == [(length - 1) // 48 * 48, left, left + 1]
    assert num_mismatched(engines, asked, cached) == 0


def test_requests_aborted_in_the_queue_take_no_slot_with_them(engines, client):
    asked = make_requests(3 * RUNNING, seed=8, max_new_tokens=60)
    with ThreadPoolExecutor(len(asked)) as pool:
        bodies = [
            {"input_ids": each.prompt_ids, "sampling_params": {"max_new_tokens": 60}}
            for each in asked
        ]
        answers = [pool.submit(client.post, "/generate", body) for body in bodies]
        time.sleep(0.5)
        while not all(answer.done() for answer in answers):
            client.post("/abort_request", {"rid": "", "abort_all": True})
            time.sleep(0.1)
    asked = make_requests(2 * RUNNING, seed=9)
    assert num_mismatched(engines, asked, engines.generate(asked)) == 0


def test_a_push_drops_the_states_of_the_weights_before(engines, client):
    request = request_of(100)
    (before,) = engines.generate([request])
    nudge(engines.trainer)
    engines.push_weights(1)
    (after,) = engines.generate([request])
    assert after.num_cached_tokens == 0
    assert after.rollout_log_probs != before.rollout_log_probs
    assert num_mismatched(engines, [request], [after]) == 0


def test_states_in_bfloat16_are_found(engines, client, directory):
    asked = make_requests(8, seed=4)
    (directory / "rounded").touch()
    completions = engines.generate(asked)
    (directory / "rounded").unlink()
    assert num_mismatched(engines, asked, completions) > 0
