"""The FSDP2 engine on one rank; two ranks and the rollout are in tests/e2e."""

import dataclasses
import math
import random

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from onpolicy.compat.process import HAS_GLIBC
from onpolicy.config import TrainConfig, groups
from onpolicy.config.flags import with_flags
from onpolicy.errors import CheckpointError, ParityError, TrainingError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training import distributed, make_trainer
from tests.support.samples import make_train_sample, with_log_probs

RATES = [1e-3]


@pytest.fixture
def make(checkpoint):
    return maker_of(checkpoint)


def maker_of(checkpoint):
    """Makes trainers; keyword arguments change the configuration's groups."""

    def make_one(dtype="float32", aligned=True, **changes):
        distributed.init_process_group()
        config = TrainConfig(
            model=groups.ModelConfig(hf_checkpoint=str(checkpoint), dtype=dtype),
            rollout=groups.RolloutConfig(
                num_rollout=10, rollout_batch_size=4, n_samples_per_prompt=2
            ),
            algorithm=groups.AlgorithmConfig(advantage_estimator="reinforce"),
            trainer=groups.TrainerConfig(max_tokens_per_gpu=100),
            parity=groups.ParityConfig(true_on_policy_mode=aligned),
        )
        for name, values in changes.items():
            group = with_flags(getattr(config, name), values)
            config = dataclasses.replace(config, **{name: group})
        hf_config = load_config(str(checkpoint))
        contract = contract_for(config, hf_config, aligned=aligned)
        return make_trainer(config, contract, 1)

    return make_one


def make_samples(trainer, count=8, seed=0):
    """Random sequences with the trainer's own log-probabilities as the rollout's."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(2, 137) for _ in range(rng.randrange(8, 60))] for _ in range(count)]
    prompt_lens = [rng.randrange(1, len(s) - 1) for s in sequences]
    log_probs = trainer.log_probs(sequences, prompt_lens, 1.0)
    return [
        make_train_sample(sequence, prompt_len, values.tolist(), rng.uniform(-1, 1), i)
        for i, (sequence, prompt_len, values) in enumerate(
            zip(sequences, prompt_lens, log_probs, strict=True)
        )
    ]


def weights(trainer):
    return {
        name: tensor for bucket in trainer.policy.weight_buckets(1 << 30) for name, tensor in bucket
    }


def with_log_prob(sample, position, value):
    changed = list(sample.rollout_log_probs)
    changed[position] = value
    return with_log_probs(sample, changed)


def test_master_weights_are_sharded_float32_and_the_checkpoints_bits(make, checkpoint):
    trainer = make(dtype="bfloat16")
    assert all(
        isinstance(p, DTensor) and p.dtype == torch.float32
        for p in trainer.policy.module.parameters()
    )
    original = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, tensor in original.named_parameters():
        assert torch.equal(weights(trainer)[name], tensor.bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_do_not_depend_on_packing(make, dtype):
    trainer, packed_otherwise = make(dtype), make(dtype, trainer={"max_tokens_per_gpu": 1})
    for a, b in zip(make_samples(trainer), make_samples(packed_otherwise), strict=True):
        assert a.rollout_log_probs == b.rollout_log_probs


def test_on_policy_samples_match_and_the_ratio_is_one(make):
    trainer = make()
    metrics = trainer.train(make_samples(trainer), 0, RATES).metrics
    assert metrics["parity/num_mismatched_tokens"] == metrics["parity/max_ulp"] == 0
    assert metrics["parity/num_compared_tokens"] > 100
    assert metrics["train/train_rollout_logprob_abs_diff"] == metrics["train/k3_kl"] == 0
    assert metrics["train/ppo_kl"] == metrics["train/pg_clipfrac"] == 0
    assert metrics["train/grad_norm"] > 0 and metrics["train/entropy"] > 0


def test_gradients_and_their_sums_go_with_the_step(make):
    """Else they would stay beside the weights while the engines sample: 4 bytes for each parameter."""
    trainer = make()
    trainer.policy.turn.sums["of a module"] = torch.ones(2)
    trainer.train(make_samples(trainer), 0, RATES)
    assert not trainer.policy.turn.sums
    assert all(parameter.grad is None for parameter in trainer.policy.module.parameters())


def test_with_several_optimizer_steps_only_the_first_is_compared(make):
    trainer = make()
    samples = make_samples(trainer)
    outcome = trainer.train(samples, 0, 4 * RATES)
    metrics = outcome.metrics
    first = sum(len(s.rollout_log_probs) for s in samples[:2])
    assert metrics["parity/num_compared_tokens"] == first
    assert metrics["parity/num_mismatched_tokens"] == 0
    assert outcome.findings.mismatched_tokens == [0, 0, *[None] * 6]
    assert metrics["train/ppo_kl"] != 0


def test_every_optimizer_step_has_its_own_rate(make):
    trainer = make()
    before = weights(trainer)
    samples = make_samples(trainer)
    assert trainer.train(samples, 0, [0.0, 0.0]).metrics["train/lr"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    assert trainer.train(samples, 1, [0.0, 1e-3]).metrics["train/lr"] == 5e-4
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


@pytest.mark.parametrize(
    "wrong", [lambda x: math.nextafter(x, 0.0) * (1 - 1e-7), lambda x: math.nan]
)
def test_one_wrong_log_prob_stops_before_the_backward_pass(make, wrong):
    trainer = make()
    samples = make_samples(trainer)
    samples[3] = with_log_prob(samples[3], 2, wrong(samples[3].rollout_log_probs[2]))
    before = weights(trainer)
    with pytest.raises(
        ParityError,
        match=r"1 of \d+ tokens .*step=7, prompt 3, sample 0, response position=2: rollout=.*train="
        r".*ulp=\d+. No step was taken.*onpolicy explain --case .*/rollout_000007.json --hf-checkpoint",
    ) as refused:
        trainer.train(samples, 7, RATES)
    findings = refused.value.findings
    assert findings.mismatched_tokens[3] == 1
    number, log_probs = findings.apart
    assert (number, len(log_probs)) == (3, len(samples[3].response_ids))
    assert set(findings.mismatched_tokens) <= {0, 1, None}
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


def test_a_mismatch_is_counted_and_logged_if_the_policy_is_to_warn(make, caplog):
    trainer = make(parity={"parity_policy": "warn"})
    samples = make_samples(trainer)
    samples[0] = with_log_prob(samples[0], 0, -1.0)
    samples[5] = with_log_prob(with_log_prob(samples[5], 0, -1.0), 1, -1.0)
    outcome = trainer.train(samples, 0, RATES)
    assert outcome.metrics["parity/num_mismatched_tokens"] == 3
    assert outcome.findings.mismatched_tokens == [1, 0, 0, 0, 0, 2, 0, 0]
    assert "3 of" in caplog.text


@pytest.mark.parametrize("rates", [RATES, RATES * 2])
def test_under_a_stock_contract_old_log_probs_are_the_trainers_own(make, rates, monkeypatch):
    """So the ratio starts at 1 although the rollout's log-probabilities differ; what one optimizer
    step computes anyway is not computed before it."""
    trainer, passes = make(aligned=False), []
    samples = [with_log_prob(s, 0, s.rollout_log_probs[0] - 0.5) for s in make_samples(trainer)]
    score = trainer.policy.score
    monkeypatch.setattr(trainer.policy, "score", lambda *args: passes.append(args) or score(*args))
    metrics = trainer.train(samples, 0, rates).metrics
    assert len(passes) == len(rates) - 1
    assert metrics["parity/num_mismatched_tokens"] * len(rates) >= len(samples)
    assert (metrics["train/ppo_kl"] == 0) == (rates == RATES)
    assert abs(metrics["train/ppo_kl"]) < 0.01  # to the rollout it is 0.026 and more
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0


def test_bypass_takes_the_rollouts_log_probs_and_computes_none(make, monkeypatch):
    flags = {"use_rollout_logprobs": True, "get_mismatch_metrics": True}
    trainer = make(aligned=False, fallback=flags)
    samples = [with_log_prob(s, 0, s.rollout_log_probs[0] - 0.1) for s in make_samples(trainer)]
    scored = []
    monkeypatch.setattr(trainer.policy, "score", lambda *args: scored.append(args))
    metrics = trainer.train(samples, 0, RATES).metrics
    assert scored == []
    assert metrics["train/ppo_kl"] < -1e-3  # the ratio is the one between the engines
    assert metrics["mismatch/k1"] < -1e-3  # measured all the same


MIS = {"use_tis": True, "use_rs": True, "tis_upper_bound": 1.05, "tis_batch_normalize": True}


def test_corrections_do_not_depend_on_the_micro_batches(make):
    results = []
    for max_tokens in (60, 1000):
        trainer = make(aligned=False, fallback=MIS, trainer={"max_tokens_per_gpu": max_tokens})
        samples = make_samples(trainer)
        rng = random.Random(5)
        samples = [
            with_log_probs(s, [x + rng.uniform(-0.1, 0.1) for x in s.rollout_log_probs])
            for s in samples
        ]
        metrics = trainer.train(samples, 0, RATES).metrics
        corrected = ("mismatch/", "correction/", "estimator/")
        results.append({k: v for k, v in metrics.items() if k.startswith(corrected)})
    few, many = results
    assert 0 < few["correction/truncated_fraction"] < 1
    assert few.keys() == many.keys()
    # The trainer's own kernels are stock here, so its log-probabilities round with the batch.
    assert all(few[name] == pytest.approx(many[name], rel=1e-3, abs=1e-4) for name in few)


def test_a_log_prob_that_is_not_finite_stops_the_run_in_plain_words_or_is_rejected(make):
    flags = {"use_tis": True, "dc_mode": "fixed", "get_mismatch_metrics": True}
    stops, rejects = (
        make(aligned=False, fallback={**flags, "tis_nonfinite": how}) for how in ("error", "reject")
    )
    samples = make_samples(stops)
    samples[2] = with_log_prob(samples[2], 1, -math.inf)
    with pytest.raises(
        TrainingError, match=r"--tis-nonfinite=error: rollout_log_probs\[\d+\]=-inf"
    ):
        stops.train(samples, 0, RATES)
    metrics = rejects.train(samples, 0, RATES).metrics
    total = sum(len(s.rollout_log_probs) for s in samples)
    for name in ("mismatch/nonfinite_fraction", "correction/nonfinite_fraction"):
        assert metrics[name] == pytest.approx(1 / total)
    # What the parity check compared was that far apart.
    infinite = {name for name, value in metrics.items() if not math.isfinite(value)}
    assert infinite == {"train/train_rollout_logprob_abs_diff", "train/k3_kl"}


def test_a_mismatch_falls_back_before_any_step_was_taken(make, caplog):
    flags = {"fallback": MIS, "parity": {"true_on_policy_mode": True, "parity_policy": "fallback"}}
    falls, follows = make(**flags), make(aligned=False, fallback=MIS)
    samples = make_samples(falls)
    samples[-1] = with_log_prob(samples[-1], 0, samples[-1].rollout_log_probs[0] - 0.2)
    metrics = falls.train(samples, 0, RATES).metrics
    assert "Going on with the fallback correction" in caplog.text
    assert metrics["parity/num_fallbacks"] == 1
    assert metrics["parity/num_mismatched_tokens"] == 1
    assert metrics["correction/rejected_fraction"] > 0
    # The same as a correction from the start, on the same operators.
    follows.operators = falls.operators
    follows.policy.use(falls.operators)
    follows.train(samples, 0, RATES)
    for name, tensor in weights(follows).items():
        assert torch.equal(weights(falls)[name], tensor)


def test_a_multiplier_is_in_the_checkpoint(make, tmp_path):
    flags = {"aligned": False, "fallback": {"dc_mode": "lagrangian"}}
    first, second = make(**flags), make(**flags)
    samples = [with_log_prob(s, 0, s.rollout_log_probs[0] - 1.0) for s in make_samples(first)]
    first.train(samples, 0, RATES)
    assert first.learner.corrections.penalty.lam != 0.1
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.learner.corrections.penalty.lam == first.learner.corrections.penalty.lam


def test_the_reference_model_stays_and_its_kl_starts_at_zero(make):
    trainer = make(algorithm={"use_kl_loss": True, "kl_loss_coef": 0.5})
    first = trainer.train(make_samples(trainer), 0, RATES).metrics
    second = trainer.train(make_samples(trainer), 1, RATES).metrics
    assert first["train/kl_loss"] == 0
    assert second["train/kl_loss"] > 0


def test_gradients_that_are_not_finite_stop_the_run(make):
    trainer = make()
    samples = make_samples(trainer)
    samples[0].reward = math.inf
    before = weights(trainer)
    with pytest.raises(TrainingError, match=r"grad_norm=.*no optimizer step was taken"):
        trainer.train(samples, 0, RATES)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


def test_a_loaded_trainer_goes_on_with_the_same_bits(make, tmp_path):
    trainer = make()
    trainer.train(make_samples(trainer), 0, RATES)
    trainer.save(tmp_path)
    resumed = make()
    resumed.load(tmp_path)
    for one in (trainer, resumed):
        one.metrics = one.train(make_samples(one, seed=1), 1, [2e-3]).metrics
    assert all(torch.equal(weights(trainer)[n], t) for n, t in weights(resumed).items())
    for name in ("train/loss", "train/grad_norm", "train/lr"):
        assert trainer.metrics[name] == resumed.metrics[name]


def test_a_damaged_checkpoint_is_refused(make, tmp_path):
    trainer = make()
    trainer.save(tmp_path)
    next((tmp_path / "sharded").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="damaged or does not fit"):
        trainer.load(tmp_path)


def test_the_hook_that_miles_users_have_gives_what_our_flags_give(make):
    hook = "fallback_correction.adapters.miles.compute_mis_weights_with_cp"
    tis = {"use_tis": True, "tis_upper_bound": 1.02}
    ours, hooked = (
        make(aligned=False, fallback={**tis, "custom_tis_function_path": path})
        for path in ("", hook)
    )
    samples = [with_log_prob(s, 0, s.rollout_log_probs[0] - 0.5) for s in make_samples(ours)]
    expected, got = ours.train(samples, 0, RATES).metrics, hooked.train(samples, 0, RATES).metrics
    assert got["tis/mis_tis_truncate_fraction"] > 0
    assert got["train/pg_loss"] == pytest.approx(expected["train/pg_loss"], rel=1e-5)
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)


@pytest.mark.skipif(not HAS_GLIBC, reason="no glibc")
def test_training_on_a_rollout_gives_back_what_lies_unused_between_buffers(make):
    trainer = make()
    trainer.train(make_samples(trainer), 0, RATES)
    samples = make_samples(trainer)
    kept = [torch.ones(1 << 18) for _ in range(512)]  # of 1 MiB
    del kept[::2]
    before = psutil.Process().memory_info().rss
    trainer.train(samples, 1, RATES)
    assert before - psutil.Process().memory_info().rss > 128 << 20  # of 256


def train_shown(trainer, samples, shown):
    for number in shown:
        samples[number].is_shown = True
    return trainer.train(samples, 0, RATES).learnt


def test_of_the_shown_samples_alone_it_is_told_what_their_tokens_counted_for(make):
    trainer = make()
    samples = make_samples(trainer)
    assert train_shown(trainer, samples, ()) == {}
    trainer = make()
    learnt = train_shown(trainer, samples, (5, 2))
    assert list(learnt) == [2, 5]
    for number, found in learnt.items():
        sample = samples[number]
        (advantage,) = {*found.advantages}
        assert abs(advantage - sample.reward) < 1e-7
        assert len(found.advantages) == len(found.weights) == sample.trajectory.num_sampled
        assert {*found.weights} == {1.0}


def test_weights_are_those_of_the_correction_and_0_where_it_rejects(make):
    """Each token's own: e of the difference between its log-probabilities, up to the bound."""
    flags = {"use_tis": True, "tis_mode": "mask"}
    trainer = make(aligned=False, fallback={**flags, "tis_level": "token"})
    samples = make_samples(trainer)
    own = samples[1].rollout_log_probs
    samples[1] = with_log_prob(with_log_prob(samples[1], 0, own[0] + 0.5), 1, own[1] - 9.0)
    found_weights = train_shown(trainer, samples, [1])[1].weights
    assert abs(found_weights[0] - 0.6065307) < 1e-4
    assert found_weights[1] == 0
    assert all(abs(weight - 1) < 1e-4 for weight in found_weights[2:])
