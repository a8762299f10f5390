"""`--parity-check full`: the trainer compares the whole distribution of each sampled token.

Every engine here tells the right log-probabilities, and draws by the seeds. What it says of the rest of
the vocabulary is wrong as it was in reports elsewhere: logits divided by the temperature twice or not
at all (huggingface/trl#4159), log-probabilities of what top-p leaves (verl-project/verl#6240), rows that
chunks and discarded samples shifted by one (vllm-project/vllm#29216).
"""

import dataclasses
import re

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.ops.row_digests import row_digests
from onpolicy.trajectory import Span
from tests.onpolicy.training.fsdp.test_redraw import CUTS, cut_of, draws, greedy
from tests.onpolicy.training.fsdp.test_trainer import RATES, make, weights
from tests.support.drawing_engine import digested, sampled
from tests.support.samples import with_trajectory

__all__ = ["make"]

FULL = {"parity": {"parity_check": "full"}}
FOUND = r"^(\d+) of (\d+) tokens have the same log-probability in training as in the rollout, and"


def rows(metrics):
    return tuple(metrics[f"parity/num_{name}_rows"] for name in ("compared", "mismatched"))


def one_bit_of_another_token(step):
    found, token = step.rows, step.drawn()
    other = (token + 1) % found.shape[1]
    at = torch.arange(len(token)), other
    found[at] = torch.nextafter(found[at], torch.tensor(0.0))
    return row_digests(found)


def at_twice_the_temperature(step):
    return row_digests(step.operators.log_softmax(step.rows, step.temperature))


def at_no_temperature(step):
    return row_digests(step.operators.log_softmax(step.logits, torch.ones_like(step.temperature)))


def of_rounded_logits(step):
    logits = step.logits.bfloat16().float()
    return row_digests(step.operators.log_softmax(logits, step.temperature))


def of_the_row_beside_it(step):
    return digested(step).roll(1)


def of_nan(step):
    found = step.rows
    found[:, 3] = torch.nan
    return row_digests(found)


def none(step):
    return torch.zeros_like(digested(step))


WRONG = [
    one_bit_of_another_token, at_twice_the_temperature, at_no_temperature, of_rounded_logits,
    of_the_row_beside_it, of_nan, none,
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cut", [{}, *CUTS.values()], ids=["no cut", *CUTS])
def test_rows_of_the_same_bits_pass_before_any_cut(make, cut, dtype):
    trainer = make(rollout=cut, dtype=dtype, **FULL)
    metrics = trainer.train(sampled(trainer, cut=cut_of(cut)), 0, RATES).metrics
    assert draws(metrics) == (24, 24, 0, 0, 0) and rows(metrics) == (24, 0)


@pytest.mark.parametrize("share", ["on", "off"])
def test_rows_that_several_sequences_share_are_compared_for_each(make, share):
    trainer = make(trainer={"share_prefixes": share}, **FULL)
    samples = sampled(trainer, prompts=[[5, 9, 30, 31]] * 4)
    assert rows(trainer.train(samples, 0, RATES).metrics) == (24, 0)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_an_engine_of_another_distribution_is_found_by_the_full_check_alone(make, wrong):
    plain = make()
    metrics = plain.train(sampled(plain, digests=wrong), 0, RATES).metrics
    assert draws(metrics) == (24, 24, 0, 0, 0)
    assert not [name for name in metrics if "rows" in name]
    trainer = make(**FULL)
    before, samples = weights(trainer), sampled(trainer, digests=wrong)
    with pytest.raises(ParityError, match=FOUND) as error:
        trainer.train(samples, 0, RATES)
    found = re.search(
        r"First: step=0, prompt (\d), sample 0, response position=(\d): token=(\d+), "
        r"rollout=([0-9a-f]{16}|none), train=([0-9a-f]{16}) ",
        str(error.value),
    )
    prompt, place, token = map(int, found.groups()[:3])
    trajectory = samples[prompt].trajectory
    assert trajectory.response_ids[place] == token
    said = trajectory.row_digests[place]
    assert found[4] == (f"{said % (1 << 64):016x}" if said else "none") != found[5]
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("cut", CUTS.values(), ids=[*CUTS])
def test_an_engine_that_digests_what_a_filter_leaves_is_found(make, cut):
    trainer = make(rollout=cut, **FULL)
    samples = sampled(trainer, cut=cut_of(cut), digests=lambda step: row_digests(step.log_probs))
    with pytest.raises(ParityError, match=FOUND):
        trainer.train(samples, 0, RATES)


def test_rows_that_are_one_position_late_are_found(make):
    trainer = make(**FULL)
    late = [
        with_trajectory(s, row_digests=[0, *s.trajectory.row_digests[:-1]])
        for s in sampled(trainer)
    ]
    with pytest.raises(ParityError, match=FOUND):
        trainer.train(late, 0, RATES)


def test_an_engine_that_digests_nothing_is_found(make):
    trainer = make(**FULL)
    samples = [with_trajectory(s, row_digests=[]) for s in sampled(trainer)]
    with pytest.raises(ParityError, match=r"rollout=none, train=[0-9a-f]{16} "):
        trainer.train(samples, 0, RATES)


def test_a_run_that_is_to_warn_says_how_many_and_goes_on(make, caplog):
    trainer = make(parity={"parity_policy": "warn", "parity_check": "full"})
    found = trainer.train(sampled(trainer, digests=none), 0, RATES).metrics
    assert rows(found) == (24, 24)
    assert "24 of 24 tokens have another distribution over the vocabulary" in caplog.text


def test_a_run_that_may_fall_back_does_so_unless_tokens_were_drawn_otherwise(make):
    """A correction weighs tokens, and cannot weigh how they were drawn."""
    falls_back = {
        "parity": {"parity_policy": "fallback", "parity_check": "full"},
        "fallback": {"use_tis": True},
    }
    trainer = make(**falls_back)
    metrics = trainer.train(sampled(trainer, digests=none), 0, RATES).metrics
    assert metrics["parity/num_fallbacks"] == 1
    trainer = make(**falls_back)
    with pytest.raises(ParityError, match="drawn again are others"):
        trainer.train(sampled(trainer, greedy, digests=none), 0, RATES)


def test_tokens_of_earlier_weights_may_have_any_distribution(make):
    trainer = make(rollout={"rollout_lag": 1}, **FULL)
    spans = (Span(version=4, start=0, end=2), Span(version=5, start=2, end=6))
    samples = [
        dataclasses.replace(
            with_trajectory(s, spans=spans, row_digests=[1, 2, *s.trajectory.row_digests[2:]]),
            policy_version=5,
        )
        for s in sampled(trainer)
    ]
    assert rows(trainer.train(samples, 5, RATES).metrics) == (16, 0)


def test_a_stock_trainer_compares_none(make):
    trainer = make(aligned=False)
    metrics = trainer.train(sampled(trainer), 0, RATES).metrics
    assert not [name for name in metrics if "rows" in name]
