"""The reverse KL to a teacher: exactly 0 where teacher and policy are the same, and then alone."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from onpolicy.errors import TrainingError
from onpolicy.models.weight_files import weight_files
from onpolicy.train.advantages import Estimator
from onpolicy.train.distillation import TeacherEstimator
from tests.support.branched import branched_samples
from tests.support.megatron_ranks import Ranks
from tests.support.megatron_training import Job, equal, make, weights
from tests.support.tiny import make_checkpoint

KL, DIFFERENCE = "distillation/reverse_kl", "distillation/log_prob_abs_diff"


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("student"), "qwen3")


def job(student, teacher, backend="fsdp", mode=True, **flags):
    changes = {
        "distillation": {"teacher_checkpoint": str(teacher), **flags},
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


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("mode", [True, False])
def test_to_a_teacher_of_the_same_weights_it_is_0_for_every_token(student, backend, mode):
    """On stock operators too, since the policy scores its tokens again there."""
    if backend == "megatron":
        pytest.importorskip("megatron.core")
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


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_it_is_the_same_on_any_number_of_ranks(student, tmp_path, backend):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    teacher = make_checkpoint(tmp_path / "teacher", "qwen3-tied")
    found = []
    for count in (1, 2):
        group = Ranks(count)
        found.append(group.run(learn, job(student, teacher, backend))[0])
        group.stop()
    (metrics, alone), (others, together) = found
    assert metrics == others and equal(alone, together)
    assert metrics[KL] != 0 < metrics[DIFFERENCE]


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
    samples[0].sample.trajectory.temperatures[0] = 0.7
    with pytest.raises(TrainingError, match=r"temperature=0\.7: .* must be sampled at 1"):
        trainer.train(samples, 0, [1e-3])
