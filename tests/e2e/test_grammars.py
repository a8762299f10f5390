"""Grammars on a real server, trained by the real trainer: the same bits, and controls."""

import dataclasses
import json
import re

import pytest
import torch

from onpolicy.errors import ContractError, ParityError
from onpolicy.models.token_grammars import Matcher
from onpolicy.ops.kept_tokens import WHOLE, Cut, packed, unpacked
from onpolicy.rollout.rollouter import Episode, Rollouter
from onpolicy.rollout.sample_requests import open_group, trajectories_of
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.trajectory import Grammar
from onpolicy.types import Prompt, Request, SamplingParams
from tests.e2e.test_filters import FILTERS, VOCABULARY, train, with_filters
from tests.support.engines_fixture import make_requests
from tests.support.episodes import Part
from tests.support.tiny import make_tokenizer

pytestmark = pytest.mark.engine

WORDS = Grammar(kind="regex", text="([a-f]{3,5}-)+[0-9]{2}", stop_token_ids=(1,))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}}
ANSWER = {**SCHEMA, "required": ["a", "b"], "additionalProperties": False}
JSON = Grammar(kind="json_schema", text=json.dumps(ANSWER), stop_token_ids=(1,))


def within(requests, *grammars):
    return [
        dataclasses.replace(
            r,
            params=dataclasses.replace(
                r.params, grammar=grammars[i % len(grammars)], stop_token_ids=(1,), ignore_eos=False
            ),
        )
        for i, r in enumerate(requests)
    ]


@pytest.fixture(scope="module")
def requests():
    """Half of them with filters too, at several temperatures."""
    plain = make_requests(12, seed=31, max_new_tokens=24)
    return within([*plain[:6], *with_filters(plain[6:], **FILTERS)], WORDS, JSON)


@pytest.fixture(scope="module")
def answers(engines, requests):
    """Beside requests without grammars, which must not be changed by them."""
    plain = make_requests(6, seed=32, max_new_tokens=20)
    answers = engines.generate([*requests, *plain])
    for answer, alone in zip(answers[12:], engines.generate(plain), strict=True):
        assert answer.response_ids == alone.response_ids
        assert answer.rollout_log_probs == alone.rollout_log_probs
        assert answer.kept_tokens == alone.kept_tokens == []
    return answers[:12]


@pytest.fixture(scope="module")
def trajectories(requests, answers):
    return trajectories_of(requests, answers)


def test_answers_are_what_their_grammars_want(answers):
    tokenizer, ended = make_tokenizer(), 0
    for i, answer in enumerate(answers):
        text = tokenizer.decode(answer.response_ids).removesuffix("<eos>")
        if answer.finish_reason == "stop":
            ended += 1
            if i % 2:
                assert set(json.loads(text)) == {"a", "b"}
            else:
                assert re.fullmatch(WORDS.text, text)
    assert ended > 3


def test_no_token_differs(engines, trajectories, monkeypatch):
    for part, cut in ((trajectories[:6], None), (trajectories[6:], Cut.of(*FILTERS.values()))):
        monkeypatch.setattr(engines.trainer.learner, "cut", cut)
        metrics = train(engines, part)
        assert metrics["parity/num_mismatched_tokens"] == 0
        assert metrics["parity/num_compared_tokens"] == sum(t.num_sampled for t in part)


def test_one_token_more_in_a_set_is_found(engines, trajectories):
    kept = unpacked(trajectories[3].kept_tokens, VOCABULARY)
    kept[2, 0] = True
    sets = [*trajectories[3].kept_tokens]
    sets[2:3] = packed(kept[2:3])
    changed = dataclasses.replace(trajectories[3], kept_tokens=sets)
    with pytest.raises(ParityError, match=r"^1 of .*sample 3.*position=2.*keeps other"):
        train(engines, [*trajectories[:3], changed, *trajectories[4:6]])


def test_a_mask_that_the_trainer_leaves_out_is_found(engines, trajectories, monkeypatch):
    everything = torch.ones(VOCABULARY, dtype=torch.bool)
    monkeypatch.setattr(Matcher, "allowed", lambda self: everything)
    with pytest.raises(ParityError, match=r"^(\d+) of \1 tokens"):
        train(engines, trajectories[:6])


def test_a_mask_that_the_engine_leaves_out_is_found(engines, requests):
    """It samples without the grammar that the trajectory says."""
    bare = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, grammar=None))
        for r in requests[:6]
    ]
    free = trajectories_of(requests[:6], engines.generate(bare))
    with pytest.raises(ParityError, match="tokens have another log-probability in training"):
        train(engines, free)


def test_an_answer_goes_on_in_another_request_where_it_was(engines, requests, answers):
    cut = [
        dataclasses.replace(r, prompt_ids=[*r.prompt_ids, *a.response_ids[:5]], num_begun=5)
        for r, a in zip(requests, answers, strict=True)
    ]
    for rest, answer in zip(engines.generate(cut), answers, strict=True):
        length = len(answer.response_ids) - 5
        assert rest.response_ids[:length] == answer.response_ids[5:]
        assert rest.rollout_log_probs[:length] == answer.rollout_log_probs[5:]
        assert rest.kept_tokens[:length] == answer.kept_tokens[5:]


def test_an_answer_that_begins_anew_where_it_was_to_go_on_is_found(engines, requests, answers):
    """As after a push of a free run, if the engine were not told how far it had come."""
    asked, begun = requests[:6:2], answers[:6:2]  # after their beginnings other words are allowed
    anew = [
        dataclasses.replace(r, prompt_ids=[*r.prompt_ids, *a.response_ids[:5]])
        for r, a in zip(asked, begun, strict=True)
    ]
    joined = [
        dataclasses.replace(
            rest,
            response_ids=[*a.response_ids[:5], *rest.response_ids],
            rollout_log_probs=[*a.rollout_log_probs[:5], *rest.rollout_log_probs],
            kept_tokens=[*a.kept_tokens[:5], *rest.kept_tokens],
            spans=(),
        )
        for rest, a in zip(engines.generate(anew), begun, strict=True)
    ]
    with pytest.raises(ParityError, match="keeps other"):
        train(engines, trajectories_of(asked, joined))


def test_an_engine_that_goes_on_where_nothing_can_follow_is_found(engines, requests):
    """The vocabulary has no space; the engine draws what comes after the first token from all of it."""
    alone = Grammar(kind="regex", text="a[a-f]*", stop_token_ids=(1,))
    stuck = Grammar(kind="regex", text="a b", stop_token_ids=(1,))
    (asked,) = within(requests[:1], alone)
    asked = dataclasses.replace(asked, params=dataclasses.replace(asked.params, max_new_tokens=1))
    (first,) = engines.generate([asked])
    free = dataclasses.replace(
        asked,
        prompt_ids=[*asked.prompt_ids, *first.response_ids],
        params=dataclasses.replace(asked.params, grammar=None, max_new_tokens=4),
    )
    (rest,) = engines.generate([free])
    joined = dataclasses.replace(
        rest,
        response_ids=[*first.response_ids, *rest.response_ids],
        rollout_log_probs=[*first.rollout_log_probs, *rest.rollout_log_probs],
        kept_tokens=[*first.kept_tokens, *[WHOLE] * len(rest.response_ids)],
        spans=(),
    )
    with pytest.raises(ParityError, match=r"^1 of 5 tokens.*keeps other"):
        train(engines, trajectories_of(within([asked], stuck), [joined]))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(kind="regex", text="(a", stop_token_ids=(1,)), "regex='\\(a'.*parenthesis"),
        (Grammar(kind="regex", text=" a", stop_token_ids=(1,)), "no token of the vocabulary"),
        (Grammar(kind="regex", text="a b", stop_token_ids=(1,)), "no token of the vocabulary"),
        (
            Grammar(kind="json_schema", text='{"uniqueItems": true}', stop_token_ids=(1,)),
            "uniqueItems",
        ),
        (
            Grammar(kind="structural_tag", text='{"structures": [{}]}', stop_token_ids=(1,)),
            "structural_tag=.*structures.*cannot be held to it",
        ),
    ],
    ids=["unreadable", "never", "stuck", "not enforced", "in no form"],
)
def test_what_cannot_be_is_refused_and_the_server_goes_on(
    engines, requests, answers, grammar, message
):
    with pytest.raises(ContractError, match=message):
        engines.generate(within(requests[:1], grammar))
    (again,) = engines.generate(requests[:1])
    assert again.rollout_log_probs == answers[0].rollout_log_probs


@pytest.mark.parametrize(
    ("begun", "message"),
    [(3, "num_begun=3: token 61 is not allowed"), (-1, "num_begun=-1"), ("x", "num_begun='x'")],
)
def test_a_beginning_that_is_none_is_refused(engines, requests, begun, message):
    prompt_ids = [5, 6, 61, 62, 63]
    with pytest.raises(ContractError, match=message):
        engines.generate([dataclasses.replace(requests[0], prompt_ids=prompt_ids, num_begun=begun)])


def test_greedy_requests_take_the_likeliest_token_that_is_allowed(engines, requests):
    greedy = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, temperature=0.0))
        for r in requests[:2]
    ]
    for alone in (greedy, [*greedy, *requests[2:4]]):
        answer = engines.generate(alone)[0]
        text = make_tokenizer().decode(answer.response_ids).removesuffix("<eos>")
        if answer.finish_reason == "stop":
            assert re.fullmatch(WORDS.text, text)
        kept = unpacked(answer.kept_tokens, VOCABULARY)
        assert kept.gather(1, torch.tensor(answer.response_ids)[:, None]).all()


class Agent(Rollouter):
    """Two turns within grammars, the first of them in two calls."""

    async def roll_out(self, prompt, turns):
        await turns.sample(regex=WORDS.text, max_tokens=7)
        if not turns.has_stopped:
            await turns.sample(regex=WORDS.text, max_tokens=20)
        turns.append([70, 71])
        await turns.sample(json_schema=ANSWER, temperature=0.8)
        return Episode()


def test_turns_within_grammars_are_the_same_in_parts_and_trained_bit_for_bit(engines):
    params = SamplingParams(temperature=1.0, max_new_tokens=60, stop_token_ids=(1,))
    rules = EpisodeRules(holds_grammars=lambda: engines.contract.is_aligned)

    def roll_out(most):
        prompt = Prompt(index=0, prompt_ids=[9, 8, 7], label="", text="")
        requests = [
            Request(prompt_ids=prompt.prompt_ids, sampling_seed=seed, params=params)
            for seed in range(4)
        ]
        group = open_group(0, prompt, requests, Agent(), rules)
        while not all(each.is_complete for each in group):
            engines.work(Part(group, most, 0))
        return [each.trajectories[0] for each in group]

    whole = roll_out(None)
    for ours, theirs in zip(roll_out(3), whole, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.rollout_log_probs == theirs.rollout_log_probs
        assert ours.kept_tokens == theirs.kept_tokens and ours.grammars == theirs.grammars
    assert train(engines, whole)["parity/num_mismatched_tokens"] == 0
    first = dataclasses.replace(whole[0], grammars=whole[0].grammars[:1])
    with pytest.raises(ParityError, match="keeps other"):
        train(engines, [first, *whole[1:]])
