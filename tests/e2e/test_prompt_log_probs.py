"""Log-probabilities of a prompt's tokens, asked of a real server: the trainer's, bit by bit."""

import pytest
import requests
import torch

from tests.support.engines_fixture import CHUNKED_PREFILL_SIZE, make_requests
from tests.support.prompt_scores import ask_of_prompts, of_prompt
from tests.support.violations import always, break_operator

pytestmark = pytest.mark.engine

VOCABULARY = 137
TEMPERATURES = (1.0, 0.7)


def scored(engines, prompts, temperature=1.0):
    return engines.trainer.log_probs(prompts, [1] * len(prompts), temperature)


def make_prompts(count=12, seed=31):
    prompts = [request.prompt_ids for request in make_requests(count, seed)]
    assert max(map(len, prompts)) > 2 * CHUNKED_PREFILL_SIZE
    return [prompt for prompt in prompts if len(prompt) > 1]


@pytest.fixture(scope="module", params=TEMPERATURES)
def temperature(request):
    return request.param


def test_they_are_the_trainers_in_batches_and_in_chunks_of_a_prefill(engines, temperature):
    prompts = make_prompts()
    expected = scored(engines, prompts, temperature)
    answers = ask_of_prompts(engines, prompts, temperature=temperature)
    assert all(
        torch.equal(of_prompt(answer), theirs)
        for answer, theirs in zip(answers, expected, strict=True)
    )


@pytest.mark.parametrize("operator", ["linear", "attention", "log_softmax"])
def test_a_trainer_off_by_one_bit_is_found(engines, monkeypatch, operator):
    prompts, operators = make_prompts(), engines.trainer.operators
    monkeypatch.setattr(operators, operator, getattr(operators, operator))
    break_operator(operators, operator, always)
    others = scored(engines, prompts)
    answers = ask_of_prompts(engines, prompts)
    assert not any(torch.equal(of_prompt(a), b) for a, b in zip(answers, others, strict=True))


def test_they_depend_neither_on_the_batch_nor_on_the_temperatures_in_it(engines):
    prompts = make_prompts()
    temperatures = [TEMPERATURES[i % 2] for i in range(len(prompts))]
    together = ask_of_prompts(engines, prompts, temperature=temperatures)
    for prompt, temperature, answer in zip(prompts, temperatures, together, strict=True):
        (alone,) = ask_of_prompts(engines, [prompt], temperature=temperature)
        assert torch.equal(of_prompt(answer), of_prompt(alone))


def test_a_request_beside_them_samples_what_it_samples_alone(engines):
    (sampled,) = make_requests(1, seed=32, max_new_tokens=1)
    prompts = [*make_prompts(), sampled.prompt_ids]
    starts = [0] * (len(prompts) - 1) + [-1]
    last = ask_of_prompts(engines, prompts, logprob_start_len=starts)[-1]
    (alone,) = ask_of_prompts(engines, prompts[-1:], logprob_start_len=-1)
    assert not last["input_token_logprobs"]
    assert last["output_token_logprobs"] == alone["output_token_logprobs"]


def test_those_after_a_cached_prefix_are_the_same(engines):
    prompt = max(make_prompts(), key=len)
    (whole,) = ask_of_prompts(engines, [prompt])
    for start in (1, 47, 48, len(prompt) - 2):
        (part,) = ask_of_prompts(engines, [prompt], logprob_start_len=start)
        assert part["cached_tokens"] > 0 or start == 1
        assert torch.equal(of_prompt(part), of_prompt(whole)[start:])


def test_a_response_sent_back_has_the_numbers_that_it_was_sampled_with(engines):
    requests_ = make_requests(4, seed=33, temperature=0.7)
    for request, completion in zip(requests_, engines.generate(requests_), strict=True):
        (answer,) = ask_of_prompts(
            engines, [[*request.prompt_ids, *completion.response_ids]], temperature=0.7
        )
        numbers = torch.tensor(completion.rollout_log_probs)
        assert torch.equal(of_prompt(answer)[-len(numbers) :], numbers)


def rows_of(answers):
    """[rows, numbers] of a field whose every row is a list of (log-probability, token, text)."""
    return torch.tensor([[value for value, *_ in row] for row in answers if row is not None])


def test_those_of_given_and_of_the_likeliest_tokens_are_of_the_same_distribution(engines):
    prompts, tokens = make_prompts(4), list(range(VOCABULARY))
    numbers = list(range(1, len(prompts) + 1))  # every request asks for another one
    asked = {"token_ids_logprob": [tokens] * len(prompts), "top_logprobs_num": numbers}
    answers = ask_of_prompts(engines, prompts, **asked)
    for prompt, number, answer in zip(prompts, numbers, answers, strict=True):
        all_of_them = rows_of(answer["input_token_ids_logprobs"])
        chosen = all_of_them.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert torch.equal(chosen, of_prompt(answer))
        top = answer["input_top_logprobs"]
        ids = torch.tensor([[token for _, token, *_ in row] for row in top if row is not None])
        assert torch.equal(rows_of(top), all_of_them.topk(number).values)
        assert torch.equal(rows_of(top), all_of_them.gather(1, ids))


def test_a_request_of_no_token_has_the_distribution_of_the_next_one(engines, temperature):
    prompts, tokens = make_prompts(), list(range(VOCABULARY))
    prompts.sort(key=len)
    answers = ask_of_prompts(
        engines,
        prompts,
        logprob_start_len=-1,
        token_ids_logprob=[tokens] * len(prompts),
        top_logprobs_num=2,
        sampling_params=[{"max_new_tokens": 0, "temperature": temperature}] * len(prompts),
    )
    sequences = [[*prompts[0], token] for token in tokens]
    lens = [len(prompts[0])] * VOCABULARY
    expected = torch.cat(engines.trainer.log_probs(sequences, lens, temperature))
    assert torch.equal(rows_of(answers[0]["output_token_ids_logprobs"])[0], expected)
    assert torch.equal(rows_of(answers[0]["output_top_logprobs"])[0], expected.topk(2).values)


@pytest.mark.parametrize("field", ["token_indices_to_pool", "multi_item_delimiter_indices"])
def test_scores_at_chosen_positions_are_refused_by_name(engines, field):
    server = engines.rollout.servers[0]
    body = {
        "input_ids": [[5, 6, 7]], field: [[1]], "token_ids_logprob": [[5]], "return_logprob": True,
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {server.spec.api_key}"}
    answer = requests.post(f"{server.url}/generate", json=body, headers=headers, timeout=120)
    assert answer.status_code == 400
    assert f"{field}=[1]: not available in true-on-policy mode" in answer.text
