"""Samples to read: which ones, what stands in them, and that a resumed run repeats none."""

import dataclasses
import json
import math
from hashlib import sha256

import pytest

from onpolicy.images.placed import PlacedImage
from onpolicy.outputs.samples import (
    MOST_CHARACTERS,
    MOST_OF_A_PROMPT,
    FailedAttempt,
    SampleLog,
)
from onpolicy.trajectory import Trajectory
from onpolicy.types import LearntTokens, Prompt, Sample, SampleGroup
from tests.support.samples import answered, make_completion


def decode(token_ids):
    return "".join("<eos>" if token == 1 else chr(token) for token in token_ids)


def group(index, size=8, prompt="1+1=", response="2", **changes):
    asked = Prompt(index=index, prompt_ids=[ord(c) for c in prompt], label="2", text=prompt)
    values = {
        "prompt": asked,
        "trajectory": answered(
            asked, make_completion([*map(ord, response), 1], [-0.5] * (len(response) + 1))
        ),
        **changes,
    }
    return SampleGroup(
        prompt=asked, samples=[Sample(sample_index=i, **values) for i in range(size)]
    )


@pytest.fixture
def log(tmp_path):
    return lambda count=16, first_step=0: SampleLog(tmp_path / "samples", decode, count, first_step)


@pytest.fixture
def files(tmp_path):
    def read():
        found = sorted((tmp_path / "samples").glob("*.jsonl"))
        lines = [file.read_text(encoding="utf-8").splitlines() for file in found]
        return {f.name: [json.loads(x) for x in text] for f, text in zip(found, lines, strict=True)}

    return read


def test_a_line_tells_what_was_asked_answered_and_made_of_it(log, files):
    changes = {"reward": 1.0, "reward_parts": {"answered": 1.0}, "mismatched_tokens": 3}
    log().write("rollout", 7, [group(12, 1, **changes)])
    assert files() == {
        "rollout_000007.jsonl": [
            {
                "step": 7, "prompt_index": 12, "sample": 0, "trajectory": 0, "prompt": "1+1=",
                "response": "2<eos>", "label": "2", "reward": 1.0, "reward_parts": {"answered": 1.0},
                "finish_reason": "stop", "num_tokens": 2, "mismatched_tokens": 3,
                "tokens": {"texts": ["2", "<eos>"], "log_probs": -0.5},
            }
        ]
    }  # fmt: skip


def test_a_sample_that_could_not_be_scored_has_no_reward_and_says_so(log, files):
    unscored = group(0, 1, reward=math.nan, has_failed=True)
    log().write("rollout", 0, [unscored])
    ((record,),) = files().values()
    assert record["reward"] is None and record["is_unscored"] is True
    assert "reward    it could not be scored" in log().describe(unscored.samples[0])
    log().write("rollout", 0, [group(0, 1)])
    assert "is_unscored" not in files()["rollout_000000.jsonl"][0]


def turn(sampled, text, num_tokens):
    return {"sampled": sampled, "text": text, "num_tokens": num_tokens}


def test_of_the_tokens_is_told_what_they_counted_for(log, files):
    learnt = LearntTokens(advantages=[0.5, 0.5], weights=[1.0, float("inf")])
    rollout = group(0, 6, learnt=learnt)
    shown = log(count=5).shown([rollout])
    assert [sample.sample_index for sample in shown] == [0, 1, 2, 3]
    log(count=1).write("rollout", 0, [rollout])
    (((record),),) = files().values()
    numbers = {"log_probs": -0.5, "advantages": 0.5, "weights": [1.0, None]}
    assert record["tokens"] == {"texts": ["2", "<eos>"], **numbers}


def test_a_branch_begins_a_turn_of_its_own(log, files):
    (first,) = group(0, 1).samples
    trajectory = first.trajectory.as_given(6).forked(6, "again").given([ord("?")])
    trajectory = trajectory.plus(make_completion([ord("3"), 1], [-1.0] * 2), 1.0)
    sample = dataclasses.replace(first, trajectory=trajectory)
    log().write("rollout", 0, [SampleGroup(prompt=first.prompt, samples=[sample])])
    ((record,),) = files().values()
    assert record["forks"] == [["again", 6]]
    own = [turn(False, "?", 1), turn(True, "3<eos>", 2)]
    assert record["turns"] == [turn(False, "1+1=2<eos>", 6), *own]


def test_a_sampled_turn_says_when_its_answers_were_asked_for_and_complete(log, files):
    (first,) = group(0, 1).samples
    begun = dataclasses.replace(first.trajectory, answers=(), times=())
    timed = begun.answered((0.5, 2.0)).given([ord("?")])
    for moments in ((3.0, 3.5), (3.5, 5.0)):
        timed = timed.plus(make_completion([ord("3")], [-1.0]), 1.0).answered(moments)
    sample = dataclasses.replace(first, trajectory=timed)
    log().write("rollout", 0, [SampleGroup(prompt=first.prompt, samples=[sample])])
    ((record,),) = files().values()
    found = [each.get("seconds") for each in record["turns"]]
    assert found == [None, [0.5, 2.0], None, [3.0, 5.0]]


def pictured(index, text="<#>1+1="):
    """A group whose prompt has an image of one token, a `#`."""
    at = text.index("#")
    image = PlacedImage(at, at + 1, b"image of %d" % (index % 2), "its pixels")
    ids = [*map(ord, text)]
    asked = Prompt(index=index, prompt_ids=ids, label="2", text=text, images=(image,))
    begun = Trajectory.begin(asked.prompt_ids, asked.images)
    answer = begun.plus(make_completion([ord("2"), 1], [-0.5] * 2), 1.0)
    samples = [Sample(prompt=asked, sample_index=i, trajectory=answer) for i in range(8)]
    return SampleGroup(prompt=asked, samples=samples)


def test_an_image_stands_in_its_place_in_the_text_and_is_written_once_for_all_its_samples(
    log, files, tmp_path
):
    """Images in the text made logs of hundreds of megabytes (UKGovernmentBEIS/inspect_ai #224)."""
    writer = log()
    writer.write("rollout", 0, [pictured(0), pictured(1), pictured(2)])
    writer.write("eval", 0, [pictured(0)])
    names = [sha256(b"image of %d" % i).hexdigest() for i in range(2)]
    kept = sorted((tmp_path / "samples" / "images").iterdir())
    assert [file.name for file in kept] == sorted(names)
    assert {file.read_bytes() for file in kept} == {b"image of 0", b"image of 1"}
    lines = files()["rollout_000000.jsonl"]
    asked = {"sampled": False, "text": "<\ufffc>1+1=", "images": [names[0]], "num_tokens": 7}
    assert lines[0]["turns"] == [asked, turn(True, "2<eos>", 2)]
    assert [line["turns"][0]["images"] for line in lines] == [
        [names[i]] for i in (0, 1, 0) for _ in range(4)
    ]


def test_a_character_that_stands_for_an_image_elsewhere_stands_for_none_in_what_somebody_wrote(
    log, files
):
    log().write("rollout", 0, [pictured(0, "\ufffc#\ufffc")])
    line, *_ = files()["rollout_000000.jsonl"]
    assert line["turns"][0]["text"] == r"\ufffc" "\ufffc" r"\ufffc"
    assert line["prompt"] == "\ufffc#\ufffc"


def test_images_of_further_turns_stand_in_those_and_of_a_failed_attempt_in_its_prompt(
    log, tmp_path
):
    shown = pictured(0)
    (first, *_) = shown.samples
    more = first.trajectory.given([*map(ord, "a#b#")], [
        PlacedImage(10, 11, b"second", "x"), PlacedImage(12, 13, b"third", "y"),
    ])  # fmt: skip
    sample = dataclasses.replace(first, trajectory=more.plus(make_completion([1], [-1.0]), 1.0))
    writer, attempt = log(), failed(0, said="")
    writer.write("rollout", 0, [SampleGroup(prompt=shown.prompt, samples=[sample])])
    writer.write_failed("rollout", 0, [dataclasses.replace(attempt, prompt=shown.prompt, said=[])])

    def turns(name):
        return json.loads((tmp_path / "samples" / name).read_text())["turns"]

    names = [sha256(data).hexdigest() for data in (b"image of 0", b"second", b"third")]
    found = [(each["text"], each.get("images")) for each in turns("rollout_000000.jsonl")]
    assert found == [
        ("<\ufffc>1+1=", names[:1]), ("2<eos>", None), ("a\ufffcb\ufffc", names[1:]), ("<eos>", None),
    ]  # fmt: skip
    assert [each["images"] for each in turns("failed_rollout_000000.jsonl")] == [names[:1]]


def test_of_an_episode_all_is_told_that_was_given_and_sampled(log, files):
    (first,) = group(0, 1).samples
    more = first.trajectory.given([ord("?")]).plus(make_completion([ord("3"), 1], [-1.0] * 2), 1.0)
    said = {"metrics": {"num_calls": 1.0}, "info": {"calls": ["add"]}}
    episode = [
        dataclasses.replace(first, trajectory=more, **said),
        dataclasses.replace(first, token_rewards=[0.0, 1.0], **said),
    ]
    alone = dataclasses.replace(first, sample_index=1)
    log().write("rollout", 0, [SampleGroup(prompt=first.prompt, samples=[*episode, alone])])
    ((one, two, three),) = files().values()
    assert [(x["sample"], x["trajectory"]) for x in (one, two, three)] == [(0, 0), (0, 1), (1, 0)]
    given, answer = turn(False, "1+1=", 4), turn(True, "2<eos>", 2)
    again = [turn(False, "?", 1), turn(True, "3<eos>", 2)]
    assert one["turns"] == [given, answer, *again] and two["turns"] == [given, answer]
    assert one["response"] == "2<eos>3<eos>"
    assert "token_rewards" not in one and two["token_rewards"] == [0.0, 1.0]
    assert one["metrics"] == two["metrics"] == {"num_calls": 1.0}
    assert one["info"] == two["info"] == {"calls": ["add"]}
    assert not {"turns", "metrics", "info", "token_rewards"} & three.keys()


def test_no_more_are_written_than_asked_for_and_of_several_prompts(log, files):
    log(count=6).write("rollout", 0, [group(i) for i in range(100)])
    (lines,) = files().values()
    assert [(line["prompt_index"], line["sample"]) for line in lines] == [
        *((0, i) for i in range(MOST_OF_A_PROMPT)), (1, 0), (1, 1),
    ]  # fmt: skip


def test_none_are_written_if_none_are_asked_for(log, tmp_path):
    log(count=0).write("rollout", 0, [group(0)])
    assert not (tmp_path / "samples").exists()


def test_a_resumed_run_drops_what_it_repeats_and_writes_nothing_twice(log, files, tmp_path):
    first = log()
    for step in range(5):
        first.write("rollout", step, [group(step, 1)])
    first.write("eval_aime", 2, [group(0, 1)])
    first.write("eval", 4, [group(0, 1)])
    (tmp_path / "samples" / "notes_9.jsonl").write_text("{}\n")
    resumed = log(first_step=3)
    assert (tmp_path / "samples" / "notes_9.jsonl").read_text() == "{}\n"
    (tmp_path / "samples" / "notes_9.jsonl").unlink()
    kept = ["eval_aime_000002.jsonl", *(f"rollout_{step:06d}.jsonl" for step in range(3))]
    assert list(files()) == kept
    resumed.write("rollout", 3, [group(9, 2)])
    resumed.write("rollout", 3, [group(3, 1)])
    assert [line["prompt_index"] for line in files()["rollout_000003.jsonl"]] == [3]


def test_text_of_any_kind_can_be_written_and_read_again(log, files):
    strange = 'naïve 數學\n\t"quoted" \ud800 \x85 \u2028 end'
    log().write("rollout", 0, [group(0, 1, response=strange)])
    ((line,),) = files().values()
    assert line["response"] == strange + "<eos>"


def test_on_the_console_a_long_text_has_its_beginning_and_its_end(log):
    text = log().describe(group(0, 1, response="a" * 5000 + "z", reward=-1.0).samples[0])
    prompt, response, label, reward = text.splitlines()[1:]
    assert prompt.split() == ["prompt", '"1+1="']
    assert '"aaaa' in response and response.endswith('z<eos>"') and "characters" in response
    assert len(response) < MOST_CHARACTERS + 80
    assert label.endswith('"2"') and reward.endswith("-1")


def failed(index, place=0, attempt=0, said="12", **changes):
    asked = Prompt(index=index, prompt_ids=[*map(ord, "1+1=")], label="2", text="1+1=")
    begun = Trajectory.begin(asked.prompt_ids)
    if said:
        begun = begun.plus(make_completion([*map(ord, said)], [-0.5] * len(said)), 1.0)
    values = {
        "group": index, "reason": "raised", "message": "raised KeyError: 'x'", "said": [begun], **changes
    }  # fmt: skip
    return FailedAttempt(prompt=asked, sample_index=place, attempt=attempt, **values)


def test_an_attempt_that_failed_says_what_was_said_and_why_it_failed(log, files):
    attempt = failed(12, 3, attempt=1)
    fork = attempt.said[0].as_given(6).forked(6, "again")
    fork = fork.plus(make_completion([ord("4")], [-1.0]), 1.0)
    both = dataclasses.replace(attempt, said=[*attempt.said, fork])
    log().write_failed("eval_aime", 7, [both])
    ((name, (one, two)),) = files().items()
    assert name == "failed_eval_aime_000007.jsonl"
    assert one["reward"] is None and (one["prompt_index"], one["sample"], one["attempt"]) == (
        12, 3, 1,
    )  # fmt: skip
    assert (one["failed"], one["message"]) == ("raised", "raised KeyError: 'x'")
    assert (one["prompt"], one["response"], two["response"]) == ("1+1=", "12", "4")
    assert (one["trajectory"], two["trajectory"], two["forks"]) == (0, 1, [["again", 6]])


def test_no_more_attempts_are_written_than_samples(log, files):
    log(count=6).write_failed("rollout", 0, [failed(i, k) for i in range(9) for k in range(8)])
    (lines,) = files().values()
    assert [(line["prompt_index"], line["sample"]) for line in lines] == [
        *((0, i) for i in range(MOST_OF_A_PROMPT)), (1, 0), (1, 1),
    ]  # fmt: skip
    log(count=0).write_failed("rollout", 1, [failed(0)])
    assert list(files()) == []


def test_an_attempt_that_fails_again_keeps_what_was_said_the_first_time(log, files):
    said = [failed(0), failed(1), failed(2)]
    log().write_failed("rollout", 3, said)
    before = files()
    resumed = log(first_step=3)
    assert files() == {}
    again = [failed(0, said=""), failed(1, said="", message="another"), failed(2, said="345")]
    resumed.write_failed("rollout", 3, again)
    ((first, second, third),) = files().values()
    assert [first, third] == before["failed_rollout_000003.jsonl"][::2]
    assert second["response"] == ""
    resumed.write_failed("rollout", 4, again[:1])
    assert files()["failed_rollout_000004.jsonl"][0]["response"] == ""


def test_attempts_at_a_prompt_that_is_drawn_twice_keep_each_what_it_said(log, files):
    log().write_failed(
        "rollout", 3, [failed(0, said="12", group=0), failed(0, said="345", group=6)]
    )
    before = files()
    again = [failed(0, said="", group=0), failed(0, said="", group=6)]
    log(first_step=3).write_failed("rollout", 3, again)
    assert files() == before
