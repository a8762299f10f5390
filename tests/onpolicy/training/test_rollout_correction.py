"""What corrections make of micro-batches, and the loss that comes of it."""

import dataclasses
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.adapters.verl import PRESETS, compute_rollout_correction
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.training import distributed
from onpolicy.training.batch import completed
from onpolicy.training.loss import LossSettings, policy_loss
from onpolicy.training.rollout_correction import Corrections
from onpolicy.trajectory import Trajectory
from tests.support.onpolicy_batches import make_micro_batches, scored_batch
from tests.support.samples import make_completion, make_train_sample, with_trajectory

INF, NAN = math.inf, math.nan
BYPASS = "--use-rollout-logprobs"


def config_of(*argv):
    """What a run has after these flags; they are checked."""
    needed = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "exact"]
    config = parse(TrainConfig, [*needed, *argv], "onpolicy train")
    validate(config)
    return config


def make_samples(log_ratios, advantages, rollout=-1.0):
    """One response a list, of tokens whose log pi_train - log pi_rollout will be these."""
    return [
        make_train_sample(range(len(r) + 1), 1, [rollout] * len(r), a, i)
        for i, (r, a) in enumerate(zip(log_ratios, advantages, strict=True))
    ]


def score(config, log_ratios, advantages, max_tokens=1000, ref=None, before=True):
    """(micro-batches with their scores, the trainer's log-probabilities of each).

    before: whether the trainer's were computed before the loss.
    """
    distributed.init_process_group()
    samples = make_samples(log_ratios, advantages)
    batches = make_micro_batches(samples, max_tokens=max_tokens)
    own, scored = [], []
    for batch in batches:
        r = torch.tensor([x for s in batch.samples for x in log_ratios[s.prompt.index]])
        own.append((batch.rollout_log_probs + r).requires_grad_())
        bypass = config.fallback.use_rollout_logprobs
        old = batch.rollout_log_probs if bypass else own[-1].detach().clone() if before else None
        reference = None if ref is None else torch.full_like(r, ref)
        scored.append(scored_batch(batch, old, reference))
    return scored, own


def prepare(config, *scores, active=True, **more):
    """(corrections, micro-batches, the trainer's log-probabilities of each, metrics)."""
    scored, own = score(config, *scores, **more)
    corrections = Corrections(config)
    (weighed,), metrics = corrections.weigh([scored], active=active)
    return corrections, weighed, own, metrics


def losses(config, log_ratios, advantages, max_tokens=1000, **more):
    """(loss, {index: gradients of the sample's tokens}, sums of metrics) of a global batch."""
    _, batches, own, _ = prepare(config, log_ratios, advantages, max_tokens=max_tokens, **more)
    results = [
        policy_loss(x, b, LossSettings.of(config)) for x, b in zip(own, batches, strict=True)
    ]
    total = sum(loss for loss, _ in results)
    total.backward()
    gradients = {
        s.prompt.index: part.tolist()
        for batch, x in zip(batches, own, strict=True)
        for s, part in zip(batch.samples, x.grad.split(batch.response_lens), strict=True)
    }
    sums = {name: sum(m[name].item() for _, m in results) for name in results[0][1]}
    return total.item(), [gradients[i] for i in range(len(log_ratios))], sums


# Bypass


def presets_in_the_docs():
    """{verl's preset: flags} of the table in fallback_correction/README.md."""
    page = Path(__file__).parents[3] / "fallback_correction" / "README.md"
    rows = re.findall(r"^\| `(bypass_\w+)` \| `(.*)` \|$", page.read_text(), re.MULTILINE)
    return {name: flags.split() for name, flags in rows}


def test_every_bypass_preset_of_verl_is_in_the_docs():
    assert presets_in_the_docs().keys() == {n for n, c in PRESETS.items() if c.bypass_mode}


def verl_loss(preset, log_prob, rollout, advantages, mask):
    """compute_policy_loss_bypass_mode of verl/trainer/ppo/core_algos.py; token-mean, [B, T].

    Denominators are the trainer's, from before rejection.
    """
    weights, kept, _ = compute_rollout_correction(
        preset, old_log_prob=log_prob.detach(), rollout_log_prob=rollout, response_mask=mask
    )
    if preset.loss_type == "reinforce":
        per_token = -advantages * log_prob * (1 if weights is None else weights)
    else:
        ratio = (log_prob - rollout).clamp(-20, 20).exp()
        clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        dual = torch.minimum(-advantages * 3, clipped)
        per_token = torch.where(advantages < 0, dual, clipped)
    return (per_token * kept).sum() / mask.sum()


@pytest.mark.parametrize(("name", "flags"), presets_in_the_docs().items())
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_verls_bypass_presets_run_as_flags_and_agree_with_verl(name, flags, seed, max_tokens):
    rng = random.Random(seed)
    scales = [1e-4, 3e-4, 0.01, 0.2, 0.6, 1.5]
    r = [[rng.gauss(0, s) for _ in range(rng.randrange(1, 9))] for s in scales]
    advantages = [rng.uniform(-1, 1) for _ in r]
    loss, gradients, _ = losses(config_of(BYPASS, *flags), r, advantages, max_tokens)

    width = max(map(len, r))
    mask = torch.tensor([[float(t < len(s)) for t in range(width)] for s in r])
    rollout = -mask
    log_prob = torch.tensor([[-1 + x for x in s] + [0.0] * (width - len(s)) for s in r])
    log_prob.requires_grad_()
    expected = verl_loss(PRESETS[name], log_prob, rollout, torch.tensor(advantages)[:, None], mask)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    for ours, theirs in zip(gradients, log_prob.grad.tolist(), strict=True):
        assert ours == pytest.approx(theirs[: len(ours)], rel=1e-4, abs=1e-7)


R = [[0.5, -1.0], [2.0]]


@pytest.mark.parametrize(
    ("flags", "weights"),
    [
        (["--tis-level", "token"], [math.exp(0.5), math.exp(-1), 2.0]),
        (["--tis-level", "sequence"], [math.exp(-0.5)] * 2 + [2.0]),
        (["--tis-level", "geometric"], [math.exp(-0.25)] * 2 + [2.0]),
        (["--tis-mode", "clip"], [math.exp(0.5), 0.5, 2.0]),
        (["--tis-mode", "mask"], [math.exp(0.5), math.exp(-1), 0.0]),
        (["--use-rs", "--rs-upper-bound", "1.1"], [0.0, 0.0, 0.0]),
        (["--rs-veto-threshold", "0.5"], [0.0, 0.0, 2.0]),
    ],
)
def test_reinforce_in_bypass_weighs_every_token_by_its_own_ratio(flags, weights):
    """L = -sg(w) A log pi: the gradient is -w A over the three tokens."""
    config = config_of(BYPASS, "--policy-loss", "reinforce", "--use-tis", *flags)
    loss, gradients, _ = losses(config, R, [2.0, -1.0])
    by_token = [-2 * weights[0] / 3, -2 * weights[1] / 3, weights[2] / 3]
    assert [g for s in gradients for g in s] == pytest.approx(by_token)
    log_probs = [-1 + x for s in R for x in s]
    assert loss == pytest.approx(sum(g * x for g, x in zip(by_token, log_probs, strict=True)))


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo"])
def test_a_loss_with_a_ratio_is_rejected_from_in_bypass_and_not_weighted(policy_loss):
    flags = [BYPASS, "--policy-loss", policy_loss, "--loss-aggregation", "token-mean"]
    plain = losses(config_of(*flags), R, [2.0, -1.0])[1]
    flags += ["--use-rs", "--rs-level", "sequence", "--rs-upper-bound", "5"]
    rejected = losses(config_of(*flags), R, [2.0, -1.0])[1]
    assert rejected == [plain[0], [0.0]]  # e^-0.5 is kept, e^2 is not
    assert plain[1] != [0.0]


@given(st.integers(0, 99), st.sampled_from(["token", "sequence", "geometric"]))
def test_bypass_does_not_depend_on_the_micro_batches(seed, level):
    rng = random.Random(seed)
    r = [[rng.gauss(0, 0.5) for _ in range(rng.randrange(1, 6))] for _ in range(5)]
    advantages = [rng.uniform(-1, 1) for _ in r]
    config = config_of(
        BYPASS, "--policy-loss", "reinforce", "--use-tis", "--tis-level", level, "--use-rs",
        "--rs-level", level,
    )  # fmt: skip
    (whole, one, _), (cut, other, _) = (losses(config, r, advantages, m) for m in (1000, 1))
    assert cut == pytest.approx(whole, abs=1e-6)
    assert [g for s in other for g in s] == pytest.approx([g for s in one for g in s])


def test_what_bypass_did_is_measured_over_all_its_optimizer_steps():
    config = config_of(BYPASS, "--policy-loss", "reinforce", "--use-tis")
    corrections, batches, own, metrics = prepare(config, R, [1.0, 1.0], max_tokens=1)
    assert not any(name.startswith("correction/") for name in metrics)
    trained = [([batch], [log_probs]) for batch, log_probs in zip(batches, own, strict=True)]
    first, second = sorted(trained, key=lambda step: step[0][0].response_lens[0])
    measured = corrections.measure([first, second])
    assert measured["correction/truncated_fraction"] == 0.5  # all of one step, none of the other
    assert measured["mismatch/k1"] == -2.0  # the first step alone


# In one optimizer step


def measured(config, *scores, **more):
    corrections, batches, own, metrics = prepare(config, *scores, **more)
    return metrics | corrections.measure([(batches, own)], [0, 1])


ONE_STEP = [
    [],
    ["--use-tis"],
    ["--use-tis", "--tis-level", "sequence"],
    ["--use-tis", "--tis-level", "geometric", "--tis-mode", "clip"],
    ["--use-tis", "--tis-mode", "mask", "--use-kl-loss"],
    ["--use-tis", "--use-rs", "--rs-level", "sequence", "--use-kl-loss"],
    ["--use-rs", "--rs-upper-bound", "1.1", "--policy-loss", "cispo"],
    ["--use-tis", "--rs-veto-threshold", "0.5", "--loss-aggregation", "token-mean"],
    ["--tis-nonfinite", "reject", "--get-mismatch-metrics"],
    ["--use-tis", "--tis-nonfinite", "reject", "--tis-level", "sequence"],
]


@pytest.mark.parametrize("flags", ONE_STEP, ids=" ".join)
@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_in_one_step_the_loss_does_to_the_bit_what_scores_before_it_would_have_done(
    flags, max_tokens
):
    config = config_of(*flags)
    assert not Corrections(config).needs_scores(1) and Corrections(config).needs_scores(2)
    rng = random.Random(0)
    r = [[rng.gauss(0, 0.7) for _ in range(rng.randrange(1, 7))] for _ in range(6)]
    if "reject" in flags:
        r[2][0], r[3][-1] = NAN, -INF
    case = r, [rng.uniform(-1, 1) for _ in r], max_tokens
    ref = -1.5 if "--use-kl-loss" in flags else None
    early, late = (losses(config, *case, ref=ref, before=before) for before in (True, False))
    assert early == late and early[0] != 0
    early, late = (
        measured(config, *case[:2], max_tokens=max_tokens, before=before)
        for before in (True, False)
    )
    assert early == late and early["lag/0/share"] == 1


def test_what_the_loss_is_left_to_do_is_not_what_it_does_without(monkeypatch):
    config = config_of("--use-tis")
    late = losses(config, R, [2.0, -1.0], before=False)
    monkeypatch.setattr(
        "onpolicy.training.loss.completed", lambda batch, own: completed(batch, own - 1)
    )
    assert losses(config, R, [2.0, -1.0], before=False) != late


@pytest.mark.parametrize(
    "flags",
    [["--use-tis", "--tis-batch-normalize"], ["--use-rs", "--no-rejected-in-denominator"],
     ["--dc-mode", "fixed"]],
    ids=" ".join,
)  # fmt: skip
def test_what_looks_at_the_whole_batch_needs_scores_before_the_loss(flags):
    assert Corrections(config_of(*flags)).needs_scores(1)


# What is not finite


@pytest.mark.parametrize("flags", [["--use-tis"], [], ["--use-tis", "--tis-level", "sequence"]])
@pytest.mark.parametrize("bad", [-INF, NAN])
def test_a_token_that_is_not_finite_is_rejected_before_anything_else_looks(flags, bad):
    """--dc-mode measured it and raised; nonfinite_fraction then read 0."""
    config = config_of(
        "--tis-nonfinite", "reject", "--dc-mode", "fixed", "--dc-measure", "log", *flags,
        "--use-kl-loss", "--kl-loss-type", "k2", "--kl-loss-coef", "1",
    )  # fmt: skip
    corrections, batches, own, metrics = prepare(config, [[0.5, bad], [0.25]], [1.0, 1.0], ref=-1.0)
    takes_its_sequence = "sequence" in flags
    (batch,) = batches
    assert batch.mask.tolist() == [not takes_its_sequence, False, True]
    # |r| is 0.5 and 0.25, lambda 0.1.
    left = [0.25] if takes_its_sequence else [0.5, 0.25]
    assert metrics["dc/delta_mean"] == pytest.approx(sum(left) / len(left))
    assert corrections.measure([(batches, own)])["mismatch/nonfinite_fraction"] == pytest.approx(
        1 / 3
    )
    loss, _ = policy_loss(own[0], batch, LossSettings.of(config))
    loss.backward()
    assert loss.isfinite() and own[0].grad.isfinite().all()
    assert own[0].grad[1] == 0 and own[0].grad[2] != 0


def test_a_token_that_is_not_finite_stays_in_the_denominators_as_rejected_ones_do():
    for flags, share in (
        (["--use-tis"], 1 / 3),
        (["--use-tis", "--no-rejected-in-denominator"], 0.5),
    ):
        config = config_of("--tis-nonfinite", "reject", *flags)
        _, (batch,), _, metrics = prepare(config, [[0.0, -INF], [0.0]], [1.0, 1.0])
        assert batch.shares.tolist() == pytest.approx([share, 0.0, share])
        assert metrics["correction/nonfinite_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("bad", [-INF, NAN])
def test_in_bypass_the_loss_rejects_what_is_not_finite(bad):
    config = config_of(
        BYPASS, "--policy-loss", "reinforce", "--use-tis", "--tis-nonfinite", "reject",
        "--use-kl-loss", "--kl-loss-type", "k2",
    )  # fmt: skip
    _, gradients, _ = losses(config, [[0.5, bad], [0.0]], [1.0, 1.0], ref=-1.0)
    assert gradients[0][1] == 0 and gradients[1] == [pytest.approx(-1 / 3)]
    with pytest.raises(ValueError, match=r"train_log_prob=.* at token 1"):
        argv = [BYPASS, "--policy-loss", "reinforce", "--use-tis"]
        losses(config_of(*argv), [[0.5, bad], [0.0]], [1.0, 1.0])


# From flags


def test_a_veto_on_a_ratio_takes_the_sequence():
    config = config_of("--rs-veto-threshold", "0.4")
    _, (batch,), _, _ = prepare(config, [[0.0, -1.0], [0.0]], [1.0, 1.0])
    assert batch.kept.tolist() == [False, False, True]


def test_an_aligned_rollout_is_left_alone():
    path = "fallback_correction.adapters.miles.compute_mis_weights_with_cp"
    for flags in (["--use-tis"], ["--custom-tis-function-path", path]):
        _, batches, _, metrics = prepare(config_of(*flags), R, [1.0, 1.0], active=False)
        assert metrics == {}
        assert all(b.custom is b.correction is None for b in batches)
        assert all(b.kept.all() and (b.importance_weights == 1).all() for b in batches)
        _, corrected, _, _ = prepare(config_of(*flags), R, [1.0, 1.0])
        assert any(b.custom or (b.importance_weights != 1).any() for b in corrected)


def test_a_rollout_can_be_weighed_again_as_if_for_the_first_time():
    """As one is that does not match and falls back: whatever was weighed before left no trace."""
    flags = ["--dc-mode", "fixed", "--dc-measure", "log", "--use-tis", "--tis-nonfinite", "reject"]
    config = config_of(*flags)
    scored, _ = score(config, [[0.5, -INF], [2.0]], [1.0, -1.0], max_tokens=1)
    corrections = Corrections(config)
    (plain,), _ = corrections.weigh([scored], active=False)
    (first,), metrics = corrections.weigh([scored], active=True)
    (again,), metrics_again = corrections.weigh([scored], active=True)
    assert metrics == metrics_again
    names = ("mask", "advantages", "shares", "kept", "importance_weights")
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    for name in names[:2] + names[3:]:  # each is another than before the correction
        assert any(
            not torch.equal(getattr(a, name), getattr(b, name))
            for a, b in zip(plain, first, strict=True)
        )


def of_turns(index, *turns):
    """A sample whose answers have so many tokens, with given ones between them."""
    trajectory = Trajectory.begin([1, 2])
    for count in turns:
        answer = make_completion([3] * count, [-1.0] * count)
        trajectory = trajectory.plus(answer, 1.0).given([4, 4])
    return with_trajectory(
        make_train_sample([1, 2, 3], 2, [-1.0], 1.0, index), **vars_of(trajectory)
    )


def vars_of(record):
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def test_tokens_of_a_turn_have_its_weight_and_tokens_that_count_as_given_are_in_none():
    """The second sample's first answer is learnt elsewhere, but for its last token."""
    first, second = of_turns(0, 2, 3), of_turns(1, 2, 1)
    second = replace(second, trajectory=second.trajectory.as_given(3))
    (batch,) = make_micro_batches([first, second], max_tokens=1000)
    by_index = {sample.prompt.index: sample for sample in batch.samples}
    assert [by_index[i].trajectory.num_sampled for i in (0, 1)] == [5, 2]
    expected = {0: [2, 3], 1: [1, 1]}
    assert batch.turn_lens == [n for s in batch.samples for n in expected[s.prompt.index]]
    config = config_of("--use-tis", "--tis-level", "turn", "--tis-upper-bound", "100")
    r = torch.linspace(-0.3, 0.5, 7)
    scored = scored_batch(batch, batch.rollout_log_probs + r)
    ((weighed,),), _ = Corrections(config).weigh([[scored]], active=True)
    turns = r.split(batch.turn_lens)
    wanted = torch.cat([turn.sum().exp().expand(len(turn)) for turn in turns])
    torch.testing.assert_close(weighed.importance_weights, wanted)
    assert len(set(weighed.importance_weights.tolist())) == 4
