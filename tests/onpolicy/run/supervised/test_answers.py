"""Rows as trajectories: what is learnt is what a policy would have sampled, and nothing else."""

import json

import pytest

from onpolicy.chat.template import ChatTemplate
from onpolicy.config.sft_flags import AnswersConfig
from onpolicy.errors import ConfigError
from onpolicy.run.supervised.answers import conversation, load_examples, samples_of
from tests.support.chat_tokenizers import END, TEMPLATES, byte_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "In the box?"}
THOUGHT = {"role": "assistant", "content": "hm</think>A pin."}
AGAIN = {"role": "user", "content": "And now?"}
LAST = {"role": "assistant", "content": "so</think>Nothing."}
CHAT = [SYSTEM, ASKED, THOUGHT, AGAIN, LAST]


def tokenizer_of(name="plain"):
    return byte_tokenizer(TEMPLATES[name])


def stops(tokenizer):
    return [tokenizer.convert_tokens_to_ids(END)]


def read(tmp_path, rows, tokenizer=None, max_tokens=10_000, **config):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizer or tokenizer_of()
    config = AnswersConfig(prompt_data=str(file), **config)
    return load_examples(
        str(file), config, tokenizer, stops(tokenizer), max_tokens, "--prompt-data"
    )


def learnt(trajectory, tokenizer):
    """The texts of the runs of tokens that are learnt."""
    runs, last = [], False
    for token, is_learnt in zip(trajectory.token_ids, trajectory.sampled, strict=True):
        if is_learnt and not last:
            runs.append([])
        if is_learnt:
            runs[-1].append(token)
        last = is_learnt
    return [tokenizer.decode(run) for run in runs]


def test_of_text_the_answer_and_its_end_are_learnt_and_a_row_that_repeats_another_counts(tmp_path):
    tokenizer = tokenizer_of()
    rows = [{"prompt": "1+1=", "label": "2"}] * 2
    examples = read(tmp_path, rows, tokenizer)
    assert [e.prompt.index for e in examples] == [0, 1]
    (trajectory,) = examples[0].trajectories
    assert tokenizer.decode(trajectory.token_ids) == f"1+1=2{END}"
    assert learnt(trajectory, tokenizer) == [f"2{END}"]
    assert [s.episode for s in samples_of(examples)] == [0, 1]


def test_of_a_chat_every_answer_of_the_assistant_is_learnt(tmp_path):
    tokenizer = tokenizer_of()
    rows = [{"messages": CHAT}]
    (example,) = read(tmp_path, rows, tokenizer, input_key="messages", apply_chat_template=True)
    (trajectory,) = example.trajectories
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(trajectory.token_ids) == text.removesuffix("\n")
    assert learnt(trajectory, tokenizer) == [f"{m['content']}{END}" for m in (THOUGHT, LAST)]


def test_tokens_are_those_of_an_episode_with_the_same_answers():
    """What was given, sampled and given again is tokenised apart, as `ChatTemplate` does in a run."""
    tokenizer = tokenizer_of()
    template = ChatTemplate(tokenizer, stops(tokenizer))
    (trajectory,) = conversation(template, CHAT)
    tokens = [*template.begin([SYSTEM, ASKED]), *template.encode(f"{THOUGHT['content']}{END}")]
    tokens += template.go_on(tokens, CHAT[:3], [AGAIN]).token_ids
    assert trajectory.token_ids == [*tokens, *template.encode(f"{LAST['content']}{END}")]


def test_where_a_template_writes_the_past_anew_each_answer_is_learnt_once():
    tokenizer = tokenizer_of("drops earlier thinking")
    first, second = conversation(ChatTemplate(tokenizer, stops(tokenizer)), CHAT)
    assert learnt(first, tokenizer) == [f"{THOUGHT['content']}{END}"]
    assert learnt(second, tokenizer) == [f"{LAST['content']}{END}"]
    assert "hm</think>" not in tokenizer.decode(second.token_ids)
    assert second.num_sampled == sum(second.sampled)


def test_a_chat_that_ends_with_a_question_takes_its_label(tmp_path):
    tokenizer = tokenizer_of()
    rows = [
        {"prompt": [SYSTEM, ASKED], "label": "A pin."},
        {"prompt": "In the box?", "label": "A pin."},
    ]
    for example in read(tmp_path, rows, tokenizer, apply_chat_template=True):
        assert learnt(example.trajectories[0], tokenizer) == [f"A pin.{END}"]


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": "a"}, {}, "no field 'label'"),
        ({"prompt": "a", "label": 3}, {}, "label=3. An answer to learn is text."),
        ({"prompt": CHAT}, {}, "no field 'label'"),
        ({"prompt": CHAT, "label": "x"}, {}, "Add --apply-chat-template."),
        ({"prompt": "", "label": "x"}, {}, "prompt=''. It must be text."),
        ({"prompt": ["a"], "label": "x"}, {"apply_chat_template": True}, "objects with a role"),
        ({"prompt": "a" * 30, "label": "x"}, {}, "32 tokens, and the model's context has 20."),
    ],
)
def test_a_row_that_cannot_be_learnt_is_refused_with_where_it_stands(
    tmp_path, row, settings, message
):
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: ") as refused:
        read(
            tmp_path,
            [{"prompt": "a", "label": "b"}, row],
            max_tokens=100 if settings else 20,
            **settings,
        )
    assert message in str(refused.value)


def test_a_template_whose_answers_have_no_end_is_refused(tmp_path):
    tokenizer = tokenizer_of("ends answers otherwise")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: .*ends it with no stop token"):
        read(tmp_path, [{"prompt": CHAT}], tokenizer, apply_chat_template=True)


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no rows"):
        read(tmp_path, [])
