"""The same bits on 1, 2 and 3 data-parallel ranks: weights, metrics, a run that goes on elsewhere."""

import pytest

from onpolicy.training.fsdp.fsdp_optimizer import Masters
from onpolicy.training.supervised import supervised_loss, supervised_step
from onpolicy.weights.rounding import round_weight
from tests.support.branched import branched_samples
from tests.support.megatron_ranks import Ranks
from tests.support.megatron_training import Job, equal, make, make_samples, train, weights
from tests.support.tiny import make_checkpoint

pytestmark = pytest.mark.runs

COUNTS = (1, 2, 3)
UPDATES = 3
"""Of 8 samples: the last is of two, which leaves the third of three ranks without any."""

CLIPPED = {"dtype": "bfloat16", "changes": {"trainer": {"clip_grad": 0.1}}}
ROUNDED = {
    "dtype": "bfloat16", "changes": {"engine": {"rollout_weight_format": "fp8_e4m3_block128"}}
}  # fmt: skip
"""Three ranks share the 208 rows of a matrix, of which 128 have a scale."""

ADAPTED = {
    "dtype": "bfloat16",
    "changes": {**ROUNDED["changes"], "lora": {"lora_rank": 4, "lora_target_modules": "q_proj,up_proj"},
                "operators": {"row_parallel_blocks": 1}},
}  # fmt: skip
"""Adapters, four rows of A on three ranks, beside such a base."""

OF_EXPERTS = {"dtype": "bfloat16", "changes": {"lora": {"lora_rank": 4}}}
"""Adapters of experts too, of which each rank has two of six."""

NO_MODE = {"parity": {"true_on_policy_mode": False}, "operators": {"row_parallel_blocks": 0}}
"""But operators of an aligned contract, so that nothing but the order of sums is in question."""

TERMS = {
    "advantage_estimator": "reinforce", "entropy_coef": 0.1,
}  # fmt: skip
"""Of the loss, beside the objective."""


@pytest.fixture(scope="module")
def ranks():
    groups = {count: Ranks(count) for count in COUNTS}
    yield groups
    for group in groups.values():
        group.stop()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3-moe")


def run(ranks, job, save=None, load=None, updates=1):
    """(log-probabilities, metrics without those of speed, weights) of two rollouts."""
    results = ranks.run(train, job, 2, save, load, updates)
    found = [
        [{name: x for name, x in step.items() if not name.startswith("perf/")} for step in steps]
        for _, steps, _ in results
    ]
    assert found == found[:1] * len(found)
    return results[0][0], found[0], results[0][2]


def same(a, b):
    return a[:2] == b[:2] and equal(a[2], b[2])


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("checkpoint", {"dtype": "float32"}),
        ("checkpoint", {"dtype": "bfloat16", "changes": {"algorithm": TERMS}}),
        ("mixture", CLIPPED),
        ("checkpoint", ROUNDED),
        ("checkpoint", ADAPTED),
        ("mixture", OF_EXPERTS),
    ],
    ids=[
        "float32", "with an entropy bonus", "experts, bfloat16, clipped", "rounded weights",
        "adapters beside a rounded base", "adapters of experts",
    ],
)  # fmt: skip
def test_fsdp_has_the_same_bits_on_any_number_of_ranks(ranks, request, model, settings):
    check(ranks, Job(path=request.getfixturevalue(model), backend="fsdp", **settings))


def overflow_on_one_rank(job):
    """(what is said of two steps, the loss's scale after each, weights); one sample's gradient overflows
    in the first."""
    trainer = make(job)
    samples, scale = make_samples(trainer), trainer.policy.loss_scale
    scale.value, found = 2.0**10, []
    for step, reward in enumerate((1e6, 0.5)):
        samples[0].reward = reward
        metrics = trainer.train(samples, step, [1e-3]).metrics
        found.append((metrics["train/skipped_share"], metrics["train/lr"], dict(vars(scale))))
    return found, weights(trainer)


def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(ranks, checkpoint):
    """Or a rank would go on alone, as in pull request 115710 of pytorch/pytorch."""
    job = Job(path=checkpoint, backend="fsdp", dtype="float16")
    results = [group.run(overflow_on_one_rank, job) for group in ranks.values()]
    first, second = results[0][0][0]
    assert first == (1, 0.0, {"value": 2.0**9, "good_steps": 0})
    assert second == (0, 1e-3, {"value": 2.0**9, "good_steps": 1})
    assert all(found == [first, second] for group in results for found, _ in group)
    assert all(equal(group[0][1], results[0][0][1]) for group in results)


def round_own_rows(job):
    """The weights of a trainer whose ranks make scales of their own rows."""

    def round_own(masters, name, held):
        own = held.detach().to_local().bfloat16()
        rounded = masters._rounded[name].detach().to_local()
        rounded.copy_(round_weight(own, "fp8_e4m3_block128"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Masters, "_round", round_own)
        return weights(make(job))


def test_a_scale_of_a_ranks_own_rows_has_other_bits(ranks, checkpoint):
    job = Job(path=checkpoint, backend="fsdp", **ROUNDED)
    alone, apart = (ranks[count].run(round_own_rows, job)[0] for count in (1, 3))
    assert not equal(alone, apart)


@pytest.mark.parametrize("has_experts", [False, True])
def test_megatron_has_the_same_bits_on_any_number_of_data_parallel_ranks(
    ranks, checkpoint, mixture, has_experts
):
    pytest.importorskip("megatron.core")
    job = Job(path=mixture if has_experts else checkpoint, **CLIPPED)
    check(ranks, job.under({}))


def test_megatron_has_the_same_bits_of_adapters_on_any_number_of_data_parallel_ranks(
    ranks, checkpoint
):
    pytest.importorskip("megatron.core")
    check(ranks, Job(path=checkpoint, **ADAPTED))


def check(ranks, job):
    alone, *others = (run(group, job, updates=UPDATES) for group in ranks.values())
    least = 1 if not job.config().lora.lora_rank else 0.1
    assert all(step["train/grad_norm"] > least for step in alone[1])
    assert all(same(alone, other) for other in others)


WEIGHED = ("objective", "entropy")


def learn_weighed(job, weighs=True):
    """(metrics, weights) after a rollout of two optimizer steps, most of whose samples weigh terms."""
    trainer = make(job)
    samples = make_samples(trainer)
    for number, each in enumerate(samples if weighs else []):
        count = each.trajectory.num_sampled
        for place, term in enumerate(WEIGHED if number % 4 else ()):
            said = [(number + place + token) % 3 / 2 for token in range(count)]
            each.token_weights[term] = said
    metrics = trainer.train(samples, 0, [1e-3, 1e-3]).metrics
    return {k: x for k, x in metrics.items() if not k.startswith("perf/")}, weights(trainer)


def test_weights_of_tokens_give_the_same_bits(ranks, checkpoint, backend):
    """However the samples with weights, and the few without, come together in micro-batches."""
    changes = {"algorithm": TERMS, "trainer": {"max_tokens_per_gpu": 150}}
    job = Job(path=checkpoint, backend=backend, changes=changes)
    (metrics, alone), *others = (group.run(learn_weighed, job)[0] for group in ranks.values())
    assert metrics["train/grad_norm"] > 0 == metrics["parity/num_mismatched_tokens"]
    assert all(found == metrics and equal(other, alone) for found, other in others)
    plain, unweighed = ranks[1].run(learn_weighed, job, False)[0]
    assert plain["train/pg_loss"] != metrics["train/pg_loss"] and not equal(unweighed, alone)


def learn_episodes(job):
    """(metrics, weights) after a rollout of two optimizer steps, of two episodes each."""
    trainer = make(job)
    samples = branched_samples(trainer, token_rewards=[0.1, -0.3, 0.0, 0.7, 0.0, 1.3, -0.1, 0.2])
    metrics = trainer.train(samples, 0, [1e-3, 1e-3]).metrics
    return {k: x for k, x in metrics.items() if not k.startswith("perf/")}, weights(trainer)


@pytest.mark.parametrize("estimator", ["dr_grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize("shared", [False, True])
def test_episodes_whose_trajectories_are_on_several_ranks_have_the_same_bits(
    ranks, checkpoint, backend, estimator, shared
):
    algorithm = {"advantage_estimator": estimator, "loss_aggregation": "seq-mean-token-mean"}
    choice = "on" if shared else "off"
    trainer = {"max_tokens_per_gpu": 14, "share_prefixes": choice}  # two branches that share
    changes = {"algorithm": algorithm, "trainer": trainer}
    job = Job(path=checkpoint, backend=backend, changes=changes)
    (metrics, alone), *others = (group.run(learn_episodes, job)[0] for group in ranks.values())
    assert metrics["train/grad_norm"] > 0 == metrics["parity/num_mismatched_tokens"]
    assert (metrics.get("train/distinct_tokens_share", 1) < 1) == shared
    assert all(found == metrics and equal(other, alone) for found, other in others)


def learn_answers(job):
    """(metrics, losses before and after, weights) of two supervised steps, the second of two rows."""
    trainer = make(job)
    samples = branched_samples(trainer)
    before = supervised_loss(trainer, samples)
    steps = [supervised_step(trainer, rows, 1e-3) for rows in (samples, samples[:2])]
    found = [{k: x for k, x in each.items() if not k.startswith("perf/")} for each in steps]
    return (found, before, supervised_loss(trainer, samples)), weights(trainer)


def test_given_answers_are_learnt_to_the_same_bits(ranks, checkpoint, backend):
    job = Job(path=checkpoint, backend=backend, changes={"trainer": {"max_tokens_per_gpu": 12}})
    (numbers, alone), *others = (group.run(learn_answers, job)[0] for group in ranks.values())
    assert numbers[0][0]["train/loss"] == numbers[1] > numbers[2]
    assert all(found == numbers and equal(other, alone) for found, other in others)


def test_the_engines_own_sums_have_other_bits(ranks, checkpoint, backend):
    """So the tests above would notice. Two ranks, of which each has two micro-batches, add them up in
    another order than one rank does, whatever the order of the two."""
    job = Job(path=checkpoint, backend=backend, changes=NO_MODE)
    assert not same(run(ranks[1], job), run(ranks[2], job))


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, ADAPTED], ids=["whole", "adapters"])
def test_a_run_goes_on_with_other_ranks_as_if_undisturbed(
    ranks, checkpoint, backend, tmp_path, settings
):
    job = Job(path=checkpoint, backend=backend, **settings)
    log_probs, metrics, weights = run(ranks[2], job, save=tmp_path)
    for count in (1, 3):
        resumed = run(ranks[count], job, load=tmp_path)
        assert same(resumed, (log_probs[1:], metrics[1:], weights))
