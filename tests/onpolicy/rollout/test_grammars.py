"""Answers within grammars, in episodes without engines: what is asked for, and where one goes on."""

import dataclasses
import json

import pytest

from onpolicy.rollout.failures import OtherTokensError
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.rollouter import Episode, Rollouter
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.trajectory import FinishReason, Grammar
from onpolicy.types import Prompt, Request, SamplingParams
from tests.support.episodes import Part, drive
from tests.support.samples import make_completion

PROMPT = Prompt(index=0, prompt_ids=[7, 8], label="", text="")
WORD = Grammar(kind="regex", text="a+", stop_token_ids=(1, 3))
RULES = EpisodeRules(holds_grammars=lambda: True)


class Asks(Rollouter):
    """Five tokens within a grammar, in two calls, a turn of another one, and one without any."""

    def __init__(self, first="a+"):
        self.first = first

    async def roll_out(self, prompt, turns):
        await turns.sample(regex=self.first, max_tokens=3)
        await turns.sample(regex="a+", max_tokens=2)
        turns.append([90])
        await turns.sample(json_schema={"type": "null"}, max_tokens=2)
        await turns.sample(max_tokens=1)
        return Episode()


def open_episode(rollouter, rules=RULES):
    params = SamplingParams(temperature=1.0, max_new_tokens=20, stop_token_ids=(3, 1))
    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=params)
    return OpenEpisode(rollouter, PROMPT, request, rules)


def answer(request):
    count = request.params.max_new_tokens
    return make_completion([5] * count, [-1.0] * count, finish_reason=FinishReason.LENGTH)


def parts(episode, most, number=100):
    asked = []
    for _ in range(number):
        if episode.is_complete:
            break
        job = Part([episode], most, 0)
        drive(job, answer)
        asked += job.requests
    return asked


@pytest.mark.parametrize("most", [None, 1, 2])
def test_an_answer_goes_on_in_its_grammar_by_call_and_by_part(most):
    episode = open_episode(Asks())
    asked = parts(episode, most)
    places = {len(r.prompt_ids): (r.params.grammar, r.num_begun) for r in asked}
    assert places[2] == (WORD, 0) and places[5] == (WORD, 3)
    schema, begun = places[8]
    assert json.loads(schema.text) == {"type": "null"} and begun == 0
    assert places[10] == (None, 0)
    if most == 1:
        assert [places[i][1] for i in (3, 4, 6, 9)] == [1, 2, 4, 1]
    (trajectory,) = episode.trajectories
    assert [(g.grammar.kind, g.start, g.end) for g in trajectory.grammars] == [
        ("regex", 2, 7),
        ("json_schema", 8, 10),
    ]


def test_a_function_that_asks_within_another_grammar_than_before_ends_the_run():
    before = open_episode(Asks())
    parts(before, 2, number=1)
    again = open_episode(Asks())
    again.resume(before.record())
    parts(again, 2)
    assert again.trajectories[0].grammars[0].end == 7
    other = open_episode(Asks(first="b+"))
    other.resume(before.record())
    with pytest.raises(OtherTokensError, match="gives other tokens than before"):
        parts(other, 2)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"regex": "a", "json_schema": {}}, ValueError, "held to one of them"),
        ({"regex": 5, "json_schema": None}, TypeError, "regex=5: must be a text"),
        ({"regex": "("}, ValueError, "regex='\\('.*parenthesis"),
    ],
)
def test_what_is_no_grammar_is_refused(asked, error, message):
    with pytest.raises(error, match=message):
        open_episode(Asks()).turns.grammar(**asked)


def test_a_schema_keeps_the_order_of_its_properties():
    schema = {"properties": {"b": {}, "a": {}}}
    turns = open_episode(Asks()).turns
    (grammar,) = {turns.grammar(json_schema=x) for x in (schema, json.dumps(schema))}
    assert list(json.loads(grammar.text)["properties"]) == ["b", "a"]
    assert grammar.stop_token_ids == (1, 3)


def test_an_episode_that_nothing_holds_to_a_grammar_says_so():
    episode = open_episode(Asks(), dataclasses.replace(EpisodeRules(), on_failure="drop"))
    assert parts(episode, None) == []
    (failure,) = episode.failures
    assert "regex: needs --true-on-policy-mode" in failure.message
