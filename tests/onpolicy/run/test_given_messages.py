"""What a function of the user's own gives to an episode, as tokens."""

from types import SimpleNamespace

import pytest

from onpolicy.config import TrainConfig
from onpolicy.run.sampler import Sampler
from onpolicy.trajectory import Trajectory
from tests.support.chat_tokenizers import END, PLAIN, byte_tokenizer
from tests.support.samples import make_completion

TOOL = [{"role": "tool", "content": "5"}, {"role": "user", "content": "sure?"}]
REST = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def given():
    """(what is appended, the branch so far) -> its text."""
    tokenizer = byte_tokenizer(PLAIN)
    stops = (tokenizer.convert_tokens_to_ids(END),)
    inputs = SimpleNamespace(tokenizer=tokenizer, stop_token_ids=stops, placer=None)
    sampler = SimpleNamespace(inputs=inputs, config=TrainConfig())

    def appended(more, so_far):
        return tokenizer.decode(Sampler._tokens_of(sampler, more, so_far)[0])

    return appended


def after(*token_ids):
    answer = make_completion([*token_ids], [-1.0] * len(token_ids))
    return Trajectory.begin([7, 8]).plus(answer, 1.0)


def test_messages_are_what_the_template_has_after_an_answer(given):
    stop = byte_tokenizer(PLAIN).convert_tokens_to_ids(END)
    assert given(TOOL, after(5, stop)) == REST
    assert given(TOOL, after(5)) == END + REST


def test_texts_and_tokens_are_given_as_they_are(given):
    assert given("a pin", after(5)) == "a pin"
    assert given([*range(5)], after(5)) == byte_tokenizer(PLAIN).decode([*range(5)])


def test_what_is_neither_and_messages_after_no_answer_are_refused(given):
    with pytest.raises(ValueError, match="must be a text, token ids or chat messages"):
        given([1, "a"], after(5))
    for so_far in (Trajectory.begin([7, 8]), after(5).given([6])):
        with pytest.raises(ValueError, match="chat messages come after an answer"):
            given(TOOL, so_far)
