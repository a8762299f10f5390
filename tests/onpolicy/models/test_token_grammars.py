"""Grammars: what a walk through one allows, what is refused, and what a schema would say in vain."""

import json
import re

import pytest

from onpolicy.config.groups import ModelConfig
from onpolicy.models.token_grammars import allowed_sets, require_grammar
from onpolicy.ops.kept_tokens import WHOLE, unpacked
from onpolicy.trajectory import Grammar, Trajectory
from tests.support.samples import make_completion
from tests.support.tiny import make_tokenizer

VOCABULARY = 137


@pytest.fixture(scope="module")
def sets_of(checkpoint):
    model = ModelConfig(hf_checkpoint=str(checkpoint))
    return lambda trajectory: allowed_sets([trajectory], model)


def regex(text, stops=(1,)):
    return Grammar(kind="regex", text=text, stop_token_ids=stops)


def ids(text):
    return make_tokenizer().encode(text)


def walked(grammar, text, begun=""):
    """A prompt, maybe a beginning that was sampled by another request, and an answer."""
    trajectory = Trajectory.begin(ids("xyz"))
    for part in filter(None, (begun, text)):
        answer = make_completion(ids(part), [-1.0] * len(ids(part)))
        trajectory = trajectory.plus(answer, 1.0, grammar)
    return trajectory


def texts(sets):
    masks = unpacked(sets, VOCABULARY)
    return [make_tokenizer().decode(mask.nonzero()[:, 0]) for mask in masks]


def test_every_token_has_the_set_of_those_before_it(sets_of):
    assert texts(sets_of(walked(regex("a[b-d]+e"), "abce"))) == ["a", "bcd", "bcde", "bcde"]


def test_a_complete_answer_ends_with_the_stop_tokens_of_its_grammar(sets_of):
    for stops in ((1,), (1, 9)):
        *_, last = sets_of(walked(regex("ab", stops), "ab<eos>"))
        assert unpacked([last], VOCABULARY)[0].nonzero()[:, 0].tolist() == [*stops]


def test_it_goes_on_in_the_same_grammar_and_begins_after_what_is_given(sets_of):
    grammar = regex("a[b-d]+e")
    trajectory = walked(grammar, "be", begun="a")
    assert [(span.start, span.end) for span in trajectory.grammars] == [(3, 6)]
    assert texts(sets_of(trajectory)) == ["a", "bcd", "bcde"]
    again = trajectory.given(ids("?")).plus(make_completion(ids("a"), [-1.0]), 1.0, grammar)
    assert texts(sets_of(again)) == ["a", "bcd", "bcde", "a"]
    free = trajectory.plus(make_completion(ids("m"), [-1.0]), 1.0)
    assert sets_of(free)[3] == WHOLE
    other = free.plus(make_completion(ids("q"), [-1.0]), 1.0, regex("[pq]"))
    assert texts(sets_of(other))[4] == "pq"


def test_after_a_token_that_is_not_allowed_nothing_is_said(sets_of):
    assert sets_of(walked(regex("abc"), "axc"))[2] == WHOLE


def test_where_nothing_can_follow_the_set_is_empty_and_no_token_is_in_it(sets_of):
    """The vocabulary has no space; such a token of an engine that went on must be found."""
    first, stuck = sets_of(walked(regex("a b"), "ab"))
    assert texts([first]) == ["a"]
    assert stuck != WHOLE and not unpacked([stuck], VOCABULARY).any()


def test_a_cut_trajectory_and_one_whose_beginning_counts_as_given_have_the_same_sets(sets_of):
    whole = walked(regex("a[b-d]+e"), "abce")
    sets = sets_of(whole)
    assert sets_of(whole.until(5)) == sets[:2]
    assert sets_of(whole.as_given(5)) == sets[2:]
    assert sets_of(whole.forked(4, "0").plus(make_completion(ids("q"), [-1.0]), 1.0)) == [
        sets[0],
        WHOLE,
    ]
    assert whole.until(3).grammars == ()
    on = whole.forked(4, "0").plus(
        make_completion(ids("d"), [-1.0]), 1.0, whole.grammars[0].grammar
    )
    assert texts(sets_of(on)) == ["a", "bcd"]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(", "regex='\\(': .*parenthesis is not closed"),
        ("json_schema", "{", "json_schema='{': "),
        ("json_schema", '{"type": "nonsense"}', "nonsense"),
        ("json_schema", "[]", "object or bool"),
    ],
)
def test_what_cannot_be_read_is_refused(kind, text, message):
    with pytest.raises(ValueError, match=message):
        require_grammar(kind, text, (1,))


def test_an_answer_that_could_not_end_is_refused():
    with pytest.raises(ValueError, match="--rollout-stop-token-ids"):
        require_grammar("regex", "a", ())


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"not": {}}}}, "not would be ignored"),
        ({"items": [{"anyOf": [{"uniqueItems": True}]}]}, "uniqueItems"),
        ({"format": "credit-card"}, "format 'credit-card' is not implemented"),
        (
            {"type": ["string", "null"], "pattern": "a", "maxLength": 3},
            "cannot be enforced together",
        ),
    ],
)
def test_what_would_not_be_enforced_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        require_grammar("json_schema", json.dumps(schema), (1,))


def test_what_is_enforced_or_says_nothing_is_not():
    for schema in (
        {"properties": {"not": {"type": "integer"}, "b": {"enum": [{"if": 1}]}}},
        {"type": "integer", "format": "int64"},
        {"type": "string", "format": "date", "description": "x"},
        True,
    ):
        require_grammar("json_schema", json.dumps(schema), (1,))


def test_a_schema_is_what_the_answer_is_held_to(sets_of):
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    grammar = Grammar(kind="json_schema", text=json.dumps(schema), stop_token_ids=(1,))
    sets = sets_of(walked(grammar, '{"n":true}<eos>'))
    assert texts(sets[:5]) == ["{", '"', "n", '"', ":"] and set(texts(sets[5:6])[0]) == {"t", "f"}
    assert not any(re.search("<pad>", text) for text in texts(sets))


def tag(content):
    form = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    return Grammar(
        kind="structural_tag",
        text=json.dumps({"type": "structural_tag", "format": form}),
        stop_token_ids=(1,),
    )


def test_a_structural_tag_is_what_the_answer_is_held_to(sets_of):
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    held = tag({"type": "json_schema", "json_schema": schema})
    said = '<a>{"n":true}</a><eos>'
    sets = sets_of(walked(held, said))
    assert texts(sets[:2]) == ["<", "a"] and len(sets) == len(ids(said))
    assert unpacked(sets[-1:], VOCABULARY)[0].nonzero()[:, 0].tolist() == [1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"type": "json_schema", "json_schema": {"multipleOf": 3}}, "multipleOf would be ignored"),
        ({"type": "nonsense"}, "structural_tag=.*cannot be held to it"),
    ],
)
def test_a_structural_tag_that_cannot_be_read_or_enforced_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        require_grammar("structural_tag", tag(content).text, (1,))
