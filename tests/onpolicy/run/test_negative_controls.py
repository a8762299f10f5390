"""Runs of episodes that branch, made wrong on purpose: under every schedule that is found."""

from dataclasses import replace

import pytest

from onpolicy.errors import EngineError, OnPolicyError, ParityError
from onpolicy.rollout import results
from onpolicy.run.run import Run
from onpolicy.trajectory import Trajectory
from tests.support.engines_in_memory import Engine, Host, Memory
from tests.support.run_in_memory import even_tokens, records_of, run_in_memory
from tests.support.tiny_policy import sample

pytestmark = pytest.mark.usefixtures("one_process")

MODES = {
    "lag 0": {},
    "lag 1": {"rollout_lag": 1},
    "free": {"rollout_schedule": "free", "over_sampling_batch_size": 4, "max_staleness": 2},
    "dynamic": {"dynamic_sampling": True, "over_sampling_batch_size": 2},
}


class Counts(Run):
    """Checks that each token which an engine sampled is trained on once."""

    def train(self, groups, step):
        samples = [sample for group in groups for sample in group.samples]
        learnt = sum(sample.trajectory.num_sampled for sample in samples)
        drawn = sum(n for g in groups for e in g.branches for spans in e.values() for _, n in spans)
        assert learnt == drawn, "not each token that was sampled is trained on once"
        return super().train(groups, step)


def tokenised_again(patch):
    """Another last token of a turn, as a tokenizer may find for a text that it has not made."""
    plus = Trajectory.plus

    def other(trajectory, answer, *more):
        if trajectory.num_sampled:
            *ids, last = answer.response_ids
            answer = replace(answer, response_ids=[*ids, 2 + (last + 1) % 10])
        return plus(trajectory, answer, *more)

    patch.setattr(Trajectory, "plus", other)


def mask_shifted(patch):
    made = results.learnt_once

    def shifted(trajectories):
        return [replace(each, sampled=[*each.sampled[1:], False]) for each in made(trajectories)]

    patch.setattr(results, "learnt_once", shifted)


def trained_twice(patch):
    patch.setattr("onpolicy.rollout.results.learnt_once", list)


def wrong_version(patch):
    generate = Engine.generate

    async def older(engine, session, request, takes_parts=False):
        answer = await generate(engine, session, request, takes_parts)
        if answer.weight_version < 1:
            return answer
        spans = tuple(replace(span, version=span.version - 1) for span in answer.spans)
        return replace(answer, weight_version=answer.weight_version - 1, spans=spans)

    patch.setattr(Engine, "generate", older)


def draws_greedily(patch):
    """Every other episode."""

    def draw(memory, scores, seed, place):
        return int(scores.argmax()) if seed % 2 else sample(scores, seed, place)

    patch.setattr(Memory, "draw", draw)


def draws_one_place_on(patch):
    patch.setattr(
        Memory, "draw", lambda memory, scores, seed, place: sample(scores, seed, place + 1)
    )


def draws_greedily_now_and_then(patch):
    def draw(memory, scores, seed, place):
        return int(scores.argmax()) if place % 11 == 0 else sample(scores, seed, place)

    patch.setattr(Memory, "draw", draw)


def branches_draw_alike(patch):
    """A fork goes on by the seed of its branch."""
    patch.setattr("onpolicy.rollout.turns.seed_of_branch", lambda seed, forks: seed)


DRAWN = (ParityError, r"drawn again are others|and [1-9]\d* are others than the trainer draws")
FAULTS = {
    tokenised_again: (ParityError, r"of \d+ tokens have another log-probability"),
    mask_shifted: (
        OnPolicyError,
        r"of \d+ tokens have another log-probability|learnt in an earlier",
    ),
    trained_twice: (AssertionError, "is trained on once"),
    wrong_version: (EngineError, "sampled from other weights"),
    draws_greedily: DRAWN,
    draws_one_place_on: DRAWN,
    draws_greedily_now_and_then: DRAWN,
    branches_draw_alike: DRAWN,
}


def run(directory, mode):
    values = {
        "custom_generate_function_path": "tests.support.agents.acts_by_tokens", "agent_workers": 0,
        "rollout_max_response_len": 12, "num_rollout": 2, **MODES[mode],
    }  # fmt: skip
    return run_in_memory(directory, Host(), even_tokens, make_run=Counts, eval_sets={}, **values)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_without_a_fault_passes_every_check(tmp_path, mode):
    totals = run(tmp_path, mode).totals
    assert totals.num_mismatched_tokens == 0 < totals.num_compared_tokens
    for record in records_of(tmp_path):
        compared, redrawn, otherwise, excused = (
            record[f"parity/num_{name}_tokens"]
            for name in ("compared", "redrawn", "drawn_otherwise", "excused")
        )
        assert redrawn == compared and otherwise == 0 < compared + excused
        assert excused == 0 or mode in ("lag 1", "free")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_under_every_schedule(tmp_path, monkeypatch, fault, mode):
    fault(monkeypatch)
    error, says = FAULTS[fault]
    with pytest.raises(error, match=says):
        run(tmp_path, mode)
