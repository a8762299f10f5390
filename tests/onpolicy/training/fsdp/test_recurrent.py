"""The FSDP2 engine with gated delta networks: packing, steps of the optimizer, adapters, refusals."""

import pytest
import torch

from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.training.megatron.family import family_of
from tests.onpolicy.training.fsdp.test_trainer import RATES, make_samples, maker_of, weights
from tests.support.tiny import make_checkpoint

pytestmark = pytest.mark.long

ARCHITECTURES = ("qwen3-next", "qwen3.5")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def recurrent(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("recurrent"), request.param)


@pytest.fixture
def make(recurrent):
    return maker_of(recurrent)


def test_log_probs_do_not_depend_on_packing(make):
    alone = {"max_tokens_per_gpu": 1}
    trainer, packed_otherwise = make("bfloat16"), make("bfloat16", trainer=alone)
    for a, b in zip(make_samples(trainer), make_samples(packed_otherwise), strict=True):
        assert a.rollout_log_probs == b.rollout_log_probs


def test_steps_are_on_policy_and_every_weight_of_the_networks_learns(make):
    trainer = make()
    before = weights(trainer)
    for step in (0, 1):
        metrics = trainer.train(make_samples(trainer, seed=step), step, RATES).metrics
        assert metrics["parity/num_mismatched_tokens"] == 0
        assert metrics["parity/num_compared_tokens"] > 100 and metrics["train/grad_norm"] > 0
    moved = {name for name, x in weights(trainer).items() if not torch.equal(before[name], x)}
    held = {name for name in before if ".linear_attn." in name}
    assert {name.rpartition("linear_attn.")[2] for name in held} >= {
        "A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight",
    }  # fmt: skip
    assert held <= moved


def test_a_step_has_the_same_bits_with_recomputed_activations(make):
    kept, recomputed = make(), make(trainer={"activation_checkpointing": True})
    samples = make_samples(kept)
    for trainer in (kept, recomputed):
        trainer.train(samples, 0, RATES)
    found = weights(recomputed)
    assert all(torch.equal(found[name], x) for name, x in weights(kept).items())


def test_adapters_of_their_linears_move_alone(make, recurrent):
    asked = ["in_proj_qkvz", "in_proj_ba"] if "next" in load_config(str(recurrent)).model_type else [
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
    ]  # fmt: skip
    trainer = make(lora={"lora_rank": 4, "lora_target_modules": ",".join([*asked, "out_proj"])})
    before = weights(trainer)
    for step in (0, 1):  # A has no gradient as long as B is zero
        metrics = trainer.train(make_samples(trainer), step, RATES).metrics
        assert metrics["parity/num_mismatched_tokens"] == 0
    moved = {name for name, x in weights(trainer).items() if not torch.equal(before[name], x)}
    assert moved == {name for name in before if ".lora." in name} and moved


def test_shared_prefixes_give_the_same_log_probabilities(make):
    apart, shared = make(), make(trainer={"share_prefixes": "on"})
    start = list(range(2, 72))
    group = [[*start, 9, 8], [*start, 9, 8, 7, 6], [*start, 30]]
    got = [trainer.log_probs(group, [60] * 3, 1.0) for trainer in (apart, shared)]
    assert all(map(torch.equal, *got))


def test_megatron_is_refused_by_name(recurrent):
    with pytest.raises(ConfigError, match=r"architecture=Qwen3.*Use --train-backend fsdp"):
        family_of(load_config(str(recurrent)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"row_parallel_blocks": 2}, "layers of linear attention keep their states whole"),
        ({"operators": "triton"}, "compute capability|no GPU"),
    ],
)
def test_what_their_operators_cannot_do_is_refused_by_name(make, change, problem):
    with pytest.raises(ConfigError, match=problem):
        make(operators=change)
