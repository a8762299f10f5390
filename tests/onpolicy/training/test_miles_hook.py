"""A correction of the user's own, under the signatures that Miles and slime have for it."""

import math

import pytest
import torch

from onpolicy.errors import ConfigError
from onpolicy.training.loss import LossSettings, policy_loss
from onpolicy.training.rollout_correction import miles_correction
from tests.support.onpolicy_batches import make_batch

SEEN = {}


def miles(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths,
          response_lengths, parallel_state, max_seq_lens):  # fmt: skip
    """The call in Miles' policy_loss_function, name by name."""
    SEEN.update(locals())
    return pg_loss * 3, [loss_masks[0], loss_masks[1] * 0], {"name": torch.tensor([1.0, 5.0])}


def slime(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths,
          response_lengths):  # fmt: skip
    """slime's, which has neither parallel_state nor max_seq_lens."""
    return miles(args, pg_loss=pg_loss, train_log_probs=train_log_probs,
                 rollout_log_probs=rollout_log_probs, loss_masks=loss_masks,
                 total_lengths=total_lengths, response_lengths=response_lengths,
                 parallel_state=None, max_seq_lens=None)  # fmt: skip


def vanilla_tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Miles' own takes the rest as keywords."""
    assert kwargs.keys() >= {"total_lengths", "response_lengths", "parallel_state", "max_seq_lens"}
    return slime(args, pg_loss=pg_loss, train_log_probs=train_log_probs, loss_masks=loss_masks,
                 rollout_log_probs=rollout_log_probs, total_lengths=kwargs["total_lengths"],
                 response_lengths=kwargs["response_lengths"])  # fmt: skip


def off_policy_is(args, *, pg_loss, cur_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Miles' off_policy_is_function asks for the current log-probabilities."""
    ratio = torch.exp(torch.cat(cur_log_probs) - torch.cat(rollout_log_probs))
    return pg_loss * ratio.clamp(max=1.2), loss_masks, {}


@pytest.mark.parametrize("function", [miles, slime, vanilla_tis])
def test_it_gets_what_miles_and_slime_give_it(function):
    custom = miles_correction(function, "args")
    log_probs, batch = make_batch([1.0, 1.0], [1.0, 1.0], custom=custom)
    _, metrics = policy_loss(log_probs, batch, LossSettings())
    assert SEEN["args"] == "args" and SEEN["max_seq_lens"] is None
    assert [len(x) for x in SEEN["train_log_probs"]] == SEEN["response_lengths"] == [1, 1]
    assert SEEN["total_lengths"] == [2, 2]
    assert metrics["train/pg_loss"].item() == -1.5
    assert metrics["tis/name"].item() == 3.0
    if function is miles:
        cp = SEEN["parallel_state"].cp
        assert (cp.rank, cp.size, cp.group) == (0, 1, None)
        assert SEEN["parallel_state"].intra_dp.size >= 1


def test_what_it_masks_is_rejected_for_the_kl_too():
    custom, reference = miles_correction(miles, "args"), torch.tensor([-0.5] * 2)
    log_probs, batch = make_batch([1.0, 1.0], [0.0, 0.0], ref_log_probs=reference, custom=custom)
    settings = LossSettings(kl_loss_coef=1.0, kl_loss_type="k1")
    assert policy_loss(log_probs, batch, settings)[1]["train/kl_loss"].item() == 0.25


@pytest.mark.parametrize(("bypass", "expected"), [(False, math.log(3)), (True, math.log(1.5))])
def test_in_bypass_the_loss_own_log_probs_are_the_trainers(bypass, expected):
    custom, old = miles_correction(miles, "args", bypass=bypass), torch.full((2,), math.log(3))
    log_probs, batch = make_batch([1.5, 1.5], [1.0, 1.0], old_log_probs=old, custom=custom)
    policy_loss(log_probs, batch, LossSettings())
    assert torch.cat(SEEN["train_log_probs"]).tolist() == pytest.approx([expected] * 2)
    assert not torch.cat(SEEN["train_log_probs"]).requires_grad


def test_the_current_log_probs_are_there_for_those_that_ask():
    custom, old = miles_correction(off_policy_is, "args"), torch.tensor([1.5, 1.0]).log()
    log_probs, batch = make_batch([1.5, 1.0], [1.0, 1.0], old_log_probs=old, custom=custom)
    assert policy_loss(log_probs, batch, LossSettings())[0].item() == pytest.approx(-1.1)


def test_a_function_that_needs_more_is_refused_before_the_run():
    def needs(args, *, pg_loss, tokenizer, rank=0):
        pass

    with pytest.raises(
        ConfigError, match=r"--custom-tis-function-path: needs needs tokenizer, which"
    ):
        miles_correction(needs, "args")
