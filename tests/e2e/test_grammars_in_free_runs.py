"""Answers within grammars that pushes come into while they are drawn: repeated, and bit for bit."""

import re

import pytest

from tests.support.train_runs import FREE, finish, journal_of, metrics_of, run_hash, steps_of

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.runs]

WITHIN = (
    *FREE, "--custom-generate-function-path", "own_agent.write_within",
    "--rollout-max-context-len", "160", "--rollout-max-concurrency", "4",
)  # fmt: skip

SHORTEST = 16 * 4 + 2
"""Tokens of the first answer of `write_within`, which its grammar allows to end no earlier."""

BEGIN_ANEW = """
from onpolicy.rollout import client
client._custom = lambda request: None
"""
"""What is asked for after a push is an answer that begins."""


def test_an_answer_goes_on_in_its_grammar_with_other_weights_and_is_repeated(start, tmp_path):
    ran, again = tmp_path / "ran", tmp_path / "again"
    wanted = run_hash(finish(start(ran, *WITHIN)))
    replay = ("--replay", str(journal_of(ran)), "--rollout-num-engines", "2")
    assert run_hash(finish(start(again, *WITHIN, *replay))) == wanted
    steps = steps_of(journal_of(ran))
    spans = [s["spans"] for step in steps for group in step["groups"] for s in group["samples"]]
    assert any(len(found) > 1 and found[0][1] < SHORTEST for found in spans)
    for directory in (ran, again):
        for record in metrics_of(directory):
            assert record["probe/num_mismatched_tokens"] == 0
            assert record["parity/num_mismatched_tokens"] == 0
            assert record["rollout/num_failed_episodes"] == 0


def test_an_answer_that_begins_anew_after_a_push_is_found(start, tmp_path):
    output = finish(start(tmp_path, *WITHIN, preamble=BEGIN_ANEW), code=1)
    assert re.search(r"ParityError: .*keeps other", output.replace("\n", " ")), output[-3000:]
