"""The reverse KL to a teacher, as advantages and as a loss: exactly 0 where teacher and policy are the
same, and then alone."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from onpolicy.errors import TrainingError
from onpolicy.models.weight_files import weight_files
from onpolicy.training.advantages import Estimator
from onpolicy.training.teachers import TeacherEstimator
from tests.support.branched import branched_samples
from tests.support.megatron_ranks import Ranks
from tests.support.megatron_training import Job, equal, make, weights
from tests.support.tiny import make_checkpoint

KL, DIFFERENCE = "distillation/reverse_kl", "distillation/log_prob_abs_diff"
LOSS = "distillation/kl_loss"
FORMS = [{"opd_loss": "full"}, {"opd_loss": "top-k", "opd_top_k": 5}]


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("student"), "qwen3")


def job(student, teacher, backend="fsdp", mode=True, **flags):
    changes = {
        "distillation": {"teacher_checkpoint": (str(teacher),), **flags},
        "trainer": {"max_tokens_per_gpu": 12},
        "parity": {"true_on_policy_mode": mode},
        "operators": {"row_parallel_blocks": 2 * mode},
    }
    return Job(path=student, backend=backend, changes=changes)


def learn(job):
    """(metrics of one rollout, weights after it)."""
    trainer = make(job)
    metrics = trainer.train(branched_samples(trainer), 0, [1e-3]).metrics
    return {k: x for k, x in metrics.items() if not k.startswith("perf/")}, weights(trainer)


def copied(student, directory, change):
    """The student's checkpoint with another value of one weight."""
    make_checkpoint(directory, "qwen3")
    (file,) = weight_files(directory, "--hf-checkpoint")
    (own,) = weight_files(student, "--hf-checkpoint")
    tensors = load_file(own)
    name = next(name for name in sorted(tensors) if name.endswith("down_proj.weight"))
    tensors[name][0, 0] = change(tensors[name][0, 0])
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("mode", [True, False])
def test_to_a_teacher_of_the_same_weights_it_is_0_for_every_token(student, backend, mode):
    """On stock operators too, since the policy scores its tokens again there."""
    metrics, _ = learn(job(student, student, backend, mode))
    assert (metrics[KL], metrics[DIFFERENCE]) == (0.0, 0.0)


def test_to_a_teacher_one_of_whose_weights_is_an_ulp_off_it_is_not(student, tmp_path):
    up = torch.tensor(torch.inf)
    same = copied(student, tmp_path / "same", lambda x: x)
    off = copied(student, tmp_path / "off", lambda x: torch.nextafter(x, up.to(x)))
    assert learn(job(student, same))[0][DIFFERENCE] == 0
    assert learn(job(student, off))[0][DIFFERENCE] > 0


def test_a_teacher_alone_of_the_same_weights_teaches_nothing(student):
    metrics, _ = learn(job(student, student, opd_reward_coef=0.0))
    assert metrics["train/grad_norm"] == 0
    assert learn(job(student, student))[0]["train/grad_norm"] > 0


def test_the_loss_of_a_teacher_of_the_same_weights_has_no_gradient(student, tmp_path, backend):
    for form in FORMS:
        metrics, _ = learn(job(student, student, backend, opd_reward_coef=0.0, **form))
        assert (metrics[LOSS], metrics[KL], metrics["train/grad_norm"]) == (0.0, 0.0, 0.0)
    up = torch.tensor(torch.inf)
    off = copied(student, tmp_path / "off", lambda x: torch.nextafter(x, up.to(x)))
    metrics, _ = learn(job(student, off, backend, opd_reward_coef=0.0, **form))
    assert metrics[LOSS] != 0 and metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("form", FORMS)
def test_steps_on_the_loss_lower_it(student, tmp_path, form):
    """With the rewards left out; beside them it adds to their loss what its coefficient says."""
    teacher = make_checkpoint(tmp_path / "teacher", "qwen3-tied")
    trainer = make(job(student, teacher, mode=False, opd_reward_coef=0.0, **form))
    samples = branched_samples(trainer)
    found = [trainer.train(samples, step, [1e-3]).metrics for step in range(3)]
    losses = [metrics[LOSS] for metrics in found]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]
    assert [m["train/loss"] for m in found] == losses
    beside = learn(job(student, teacher, mode=False, opd_kl_coef=0.5, **form))[0]
    assert beside[LOSS] == losses[0]
    assert beside["train/loss"] == pytest.approx(beside["train/pg_loss"] + 0.5 * losses[0])


def test_it_is_the_same_on_any_number_of_ranks(student, tmp_path, backend):
    """Samples are shared out by FSDP2; by Megatron-core also the vocabulary and the sequences, where
    gradients are added in another order."""
    teacher = make_checkpoint(tmp_path / "teacher", "qwen3-tied")
    layouts = [{}, {}, {}]
    if backend == "megatron":
        layouts = [{}, {"megatron_tp": 2}, {"megatron_cp": 2}]
    jobs = [job(student, teacher, backend, **form) for form in ({}, *FORMS)]
    found = []
    for count in (1, 2):
        group = Ranks(count)
        shared = [each.under(layout) for each, layout in zip(jobs, layouts, strict=True)]
        found.append([group.run(learn, each)[0] for each in (jobs if count == 1 else shared)])
        group.stop()
    for layout, (metrics, alone), (others, together) in zip(layouts, *found, strict=True):
        if layout:
            assert metrics.pop("train/grad_norm") == pytest.approx(others.pop("train/grad_norm"))
        else:
            assert equal(alone, together)
        assert metrics == others
        assert metrics[KL] != 0 < metrics[DIFFERENCE]
    assert found[0][1][0][LOSS] > found[0][2][0][LOSS] > 0


def together(job):
    """With all samples in one micro-batch."""
    return job.under({}, trainer={"max_tokens_per_gpu": 100})


def routed(samples):
    """The samples of the first prompt are for "code", those of the second for "math"."""
    names = ("code", "math")
    prompts = {i: replace(samples[0].prompt, index=i, metadata={"by": names[i]}) for i in (0, 1)}
    return [replace(each, prompt=prompts[each.prompt.index]) for each in samples]


@pytest.mark.parametrize("form", [{}, *FORMS])
def test_each_sample_learns_from_the_teacher_that_its_row_names(student, tmp_path, form):
    """Of two teachers that are the student the KL is 0, in micro-batches that both share; of one that is
    not it is that of its samples alone."""
    other = make_checkpoint(tmp_path / "teacher", "qwen3-tied")

    def learnt(math, code, **more):
        both = (f"math={math}", f"code={code}")
        flags = {"teacher_checkpoint": both, "teacher_key": "by", "opd_reward_coef": 0.0, **more}
        trainer = make(together(job(student, student, **flags, **form)))
        return trainer.train(routed(branched_samples(trainer)), 0, [1e-3]).metrics

    same, first, second, none = (
        learnt(*pair)
        for pair in ((student, student), (other, student), (student, other), (other, other))
    )
    assert (same[KL], same[DIFFERENCE], same["train/grad_norm"]) == (0.0, 0.0, 0.0)
    assert first[DIFFERENCE] > 0 < second[DIFFERENCE] and first["train/grad_norm"] > 0
    assert first[DIFFERENCE] + second[DIFFERENCE] == pytest.approx(none[DIFFERENCE])
    alone = make(together(job(student, other, opd_reward_coef=0.0, **form)))
    metrics = alone.train(branched_samples(alone), 0, [1e-3]).metrics
    for name in {KL, DIFFERENCE, "train/grad_norm", LOSS} & metrics.keys():
        assert metrics[name] == none[name]


def test_tokens_that_were_drawn_from_a_part_of_the_vocabulary_have_no_loss(student):
    trainer = make(job(student, student, opd_loss="full"))
    first, *others = branched_samples(trainer)
    trajectory = first.trajectory
    trajectory = replace(trajectory, kept_tokens=[b""] * trajectory.num_sampled)
    samples = [replace(first, trajectory=trajectory), *others]
    with pytest.raises(TrainingError, match="over the whole vocabulary"):
        trainer.train(samples, 0, [1e-3])


class Given(Estimator):
    """Advantages of 0.5, whatever comes."""

    def advantages(self, outcomes, ours):
        return {n: torch.full((s.trajectory.num_sampled,), 0.5) for n, s in ours.items()}


def test_advantages_are_those_of_rewards_less_the_kl_times_its_coefficient(student, tmp_path):
    teacher = make_checkpoint(tmp_path / "teacher", "qwen3-tied")
    seen = {}

    class Watched(TeacherEstimator):
        def advantages(self, outcomes, ours):
            found = super().advantages(outcomes, ours)
            seen.update({number: (scored, found[number]) for number, scored in ours.items()})
            return found

    trainer = make(job(student, teacher), Given())
    estimator = Watched(Given(), coef=0.25, reward_coef=2.0, rescored=False)
    trainer.learner.estimator = estimator
    trainer.train(branched_samples(trainer), 0, [1e-3])
    assert len(seen) == 6
    for scored, advantages in seen.values():
        own = torch.tensor(scored.trajectory.rollout_log_probs)
        wanted = 2.0 * 0.5 - 0.25 * (own - scored.scores["teacher"].log_probs)
        assert torch.equal(advantages, wanted)
        assert (advantages != 1.0).any()


def test_tokens_of_another_temperature_are_refused(student):
    trainer = make(job(student, student))
    samples = branched_samples(trainer)
    samples[0].trajectory.temperatures.array[0] = 0.7
    with pytest.raises(TrainingError, match=r"temperature=0\.7: .* must be sampled at 1"):
        trainer.train(samples, 0, [1e-3])
