"""The drift on SmolLM2: arms that are valid, gradients that are kept instead of taken, shares of them
that are right where they are known, and a table that is that of the record."""

import json

import pytest
import torch

from benchmarks import smollm2_drift as drift
from tests.onpolicy.training.fsdp.test_trainer import make, make_samples, weights

__all__ = ["make"]

RECORD = drift.ROOT / "benchmarks" / "results" / "smollm2_drift.json"


def test_each_arm_is_a_valid_run_on_the_samples_of_its_engine(tmp_path):
    for engine, (_, told, arms) in drift.ENGINES.items():
        for arm in arms:
            config = drift.config_of(arm, engine, tmp_path)
            assert config.plan.starts_aligned == (engine == "aligned")
            assert config.num_likeliest == told * arm.startswith("centered")


def gradients(mean, *noises):
    """Batches with this mean gradient; the noises have no direction in common with it, or each other."""
    noise = [torch.zeros(8).index_fill_(0, torch.tensor(4 + i), x) for i, x in enumerate(noises)]
    return [[torch.tensor([*mean, 0.0, 0.0]) + x[:4], x[4:].clone()] for x in noise]


WHOLE = gradients((2.0, 0.0), 7.0, 5.0, 3.0)


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        ((2.0, 0.0), {"drift": 1.0, "elsewhere": 1.0, "squared_taken": 0.0}),
        ((0.5, 0.0), {"drift": 0.25, "elsewhere": 0.25, "squared_taken": 2.25}),
        ((0.0, 3.0), {"drift": 0.0, "elsewhere": 1.5, "squared_taken": 13.0}),
        ((-1.0, 0.0), {"drift": -0.5, "elsewhere": 0.5, "squared_taken": 9.0}),
    ],
)
def test_the_share_of_a_known_drift_is_told_without_what_chance_adds(mean, expected):
    found = drift.judged(gradients(mean, 7.0, 5.0, 3.0), WHOLE)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["noise"] == pytest.approx(1) and found["interval"] == pytest.approx(0)
    assert found["squared_noise"] == pytest.approx((49 + 25 + 9) / 3)


def test_where_there_is_only_chance_no_drift_is_found():
    """A mean of products that counted a batch with itself would find the noise."""
    found = drift.judged(gradients((0.0, 0.0), 7.0, 5.0, 3.0), WHOLE)
    assert found["drift"] == found["elsewhere"] == found["squared_length"] == 0
    assert found["squared_length_interval"] == found["squared_taken_interval"] == 0


def test_gradients_are_those_of_a_step_which_is_not_taken(make):
    """Its rate is 1, so that a step would change every weight."""
    trainer, other = make("float32"), make("float32")
    before = {name: tensor.clone() for name, tensor in weights(trainer).items()}
    samples = make_samples(trainer)
    kept = drift.Gradients(trainer)
    (first, again), metrics = kept.of(trainer.config, [samples, samples])
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert metrics["parity/num_mismatched_tokens"] == 0 < metrics["parity/num_compared_tokens"]
    norm = torch.cat(first).double().norm().item()
    taken = other.train(make_samples(other), 0, [0.0]).metrics["train/grad_norm"]
    assert norm == pytest.approx(min(taken, trainer.config.trainer.clip_grad), rel=1e-4)


def test_the_page_has_the_table_of_the_record():
    record, page = json.loads(RECORD.read_text()), drift.PAGE.read_text()
    assert "<!-- drift: begin -->" in page and drift.with_table(page, record) == page
