"""Adapters under Megatron, in real groups of ranks, against FSDP2's; the rollout is in tests/e2e."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import is_adapters
from onpolicy.run.commands.verification import fill_with_drawn
from onpolicy.training.megatron.rank_layout import MegatronLayout
from onpolicy.training.state import IndexReader
from onpolicy.training.weight_outlet import MergedPush
from tests.onpolicy.training.megatron.test_trainer import LAYOUTS, SMOOTH, require_same_steps
from tests.support.megatron_ranks import make_contract
from tests.support.megatron_training import RATES, Job, equal, make, make_samples, weights

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.runs

TARGETS = "q_proj,v_proj,o_proj,up_proj,down_proj,lm_head"
"""Without keys and gates, which Megatron computes together with some of these."""


def job_of(path, layout="data", targets=TARGETS, dtype="float32", **changes):
    lora = {"lora_rank": 4, "lora_target_modules": targets}
    job = Job(path=path, dtype=dtype, changes={**SMOOTH, "lora": lora, **changes})
    return job.under(LAYOUTS[layout])


def learn(job, save=None, load=None, break_=nullcontext):
    """(log-probabilities of each step's samples, metrics, weights at the end, digests of the base) of a
    trainer whose adapters are drawn, or loaded after a step."""
    with break_():
        trainer = make(job)
        if load is None:
            fill_with_drawn(trainer, 0)
        else:
            trainer.load(load)
        log_probs, metrics, digests = [], [], [trainer.policy.frozen_digest()]
        for step in range(0 if load is None else 1, 2):
            samples = make_samples(trainer, seed=step)
            log_probs.append([s.rollout_log_probs for s in samples])
            metrics.append(trainer.train(samples, step, [RATES[step]]).metrics)
            if save is not None and step == 0:
                trainer.save(save)
        digests.append(trainer.policy.frozen_digest())
        return log_probs, metrics, weights(trainer), digests


def in_the_other_engine(job):
    return replace(job, backend="fsdp")


@pytest.fixture(scope="module")
def learn_there():
    """What the other engine, which has no layouts, makes of a job; each job is run once."""
    made = {}

    def find(job):
        job = in_the_other_engine(job).under({})
        if repr(job) not in made:
            made[repr(job)] = learn(job)
        return made[repr(job)]

    return find


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_adapters_compute_and_learn_as_in_the_other_engine(
    two_ranks, checkpoint, learn_there, layout
):
    job = job_of(checkpoint, layout)
    results = two_ranks.run(learn, job)
    require_same_steps(results[0][:3], learn_there(job)[:3])
    stored, after = load_file(checkpoint / "model.safetensors"), results[0][2]
    assert {name for name in after if not is_adapters(name)} == stored.keys()
    assert all(torch.equal(after[name], x) for name, x in stored.items())
    for *_, digests in results:
        assert digests[0] == digests[1] != ""


@contextmanager
def gradients_are_not_summed():
    """Each rank has its part of the gradient of a factor that all have whole."""
    target = "onpolicy.training.megatron.megatron_adapters.copy_to_tensor_model_parallel_region"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, lambda x, group: x)
        yield


@contextmanager
def parts_are_not_by_group():
    """As if all queries stood before all keys."""
    from onpolicy.training.megatron import megatron_adapters as adapters

    own = adapters._sizes

    def sizes(linear, parts):
        found = own(linear, parts)
        return [x * (len(linear.weight) // sum(found)) for x in found]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "_sizes", sizes)
        yield


@pytest.mark.parametrize("break_", [gradients_are_not_summed, parts_are_not_by_group])
def test_what_is_not_shared_out_rightly_is_noticed(two_ranks, checkpoint, learn_there, break_):
    layout = "data" if break_ is parts_are_not_by_group else "tensor"
    job = job_of(checkpoint, layout)
    results = two_ranks.run(partial(learn, break_=break_), job)[0]
    theirs = learn_there(job)
    with pytest.raises(AssertionError):
        require_same_steps(results[:3], theirs[:3])


@pytest.mark.parametrize("targets", [TARGETS, "lm_head"])
@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_layers_that_are_computed_again_learn_the_same(two_ranks, checkpoint, layout, targets):
    """Where no weight of the first layers has a gradient, or a stage has none to train."""
    again = {"activation_checkpointing": True, **SMOOTH["trainer"]}
    once, twice = (
        two_ranks.run(learn, job_of(checkpoint, layout, targets, **changes))[0]
        for changes in ({}, {"trainer": again})
    )
    assert once[0] == twice[0] and equal(once[2], twice[2])
    assert once[1][1]["train/grad_norm"] == twice[1][1]["train/grad_norm"] > 0


@pytest.mark.parametrize("layout", ["tensor", "tensor and sequence", "pipeline"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3", {}),
        ("qwen3-tied", {"engine": {"rollout_weight_format": "int4_group128"}}),
        ("olmo2", {}),
        ("qwen2", {"engine": {"rollout_weight_format": "int4_group128"}}),
    ],
    ids=[
        "qwen3", "a rounded tied base", "norms after linears", "biases, a rounded base",
    ],
)  # fmt: skip
def test_in_bfloat16_the_first_log_probabilities_are_those_of_the_other_engine(
    two_ranks, model_of, learn_there, layout, architecture, changes
):
    job = job_of(model_of(architecture), layout, "all-linear", "bfloat16", **changes)
    log_probs, metrics, after, _ = two_ranks.run(learn, job)[0]
    theirs = learn_there(job)
    assert log_probs[0] == theirs[0][0]
    assert all(step["parity/num_mismatched_tokens"] == 0 for step in metrics)
    assert after.keys() == theirs[2].keys()
    for name, tensor in theirs[2].items():
        assert torch.equal(after[name], tensor) != is_adapters(name), name


ALPHA = {"lora_rank": 8, "lora_alpha": 16.0, "lora_target_modules": "q_proj,down_proj"}
WITH_REFERENCE = {"lora": ALPHA, "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.5}}


def begin(job, drawn=False):
    """(log-probabilities, those of the reference, of both again after a step, numbers that the optimizer
    keeps)."""
    trainer = make(job)
    if drawn:
        fill_with_drawn(trainer, 0)
    policy, reference = trainer.policy, trainer.models["reference"]
    assert reference.module is policy.module and not reference.optimizer_tensors()

    def scored(model):
        trainer.models["policy"] = model
        return [s.rollout_log_probs for s in make_samples(trainer)]

    before = scored(policy), scored(reference)
    trainer.models["policy"] = policy
    trainer.train(make_samples(trainer), 0, RATES)
    after = scored(policy), scored(reference)
    return before, after, sum(x.numel() for x in policy.optimizer_tensors())


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "context"])
def test_the_reference_is_the_base_in_the_same_memory(two_ranks, checkpoint, layout):
    """And as long as B is zero, the policy's log-probabilities are those of the base."""
    job = Job(path=checkpoint, dtype="bfloat16", changes=WITH_REFERENCE).under(LAYOUTS[layout])
    whole = make(Job(path=checkpoint, dtype="bfloat16", backend="fsdp"))
    of_base = [s.rollout_log_probs for s in make_samples(whole)]
    (policy, reference), (moved, again), numbers = two_ranks.run(begin, job)[0]
    assert policy == reference == again == of_base != moved
    (policy, reference), *_ = two_ranks.run(partial(begin, drawn=True), job)[0]
    assert policy != reference == of_base
    hidden, queries, inner, layers = 96, 192, 208, 2
    adapters = 8 * layers * (hidden + queries + inner + hidden)
    assert numbers <= 3 * adapters + 100  # masters and two moments


@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
def test_a_checkpoint_holds_adapters_alone_and_goes_on_with_the_same_bits(
    two_ranks, checkpoint, layout, tmp_path
):
    job = job_of(checkpoint, layout, dtype="bfloat16")
    whole = two_ranks.run(learn, job, tmp_path)[0]
    resumed = two_ranks.run(learn, job, None, tmp_path)[0]
    assert resumed[0] == whole[0][1:] and equal(resumed[2], whole[2])
    held = IndexReader(tmp_path / "sharded").read_metadata().state_dict_metadata
    names = {name for name in held if not name.startswith("optimizer.")}
    assert names and all(map(is_adapters, names))


def test_a_checkpoint_of_adapters_may_be_loaded_in_another_layout(two_ranks, checkpoint, tmp_path):
    job = job_of(checkpoint, "tensor")
    log_probs, *_ = two_ranks.run(learn, job, tmp_path)[0]
    for layout in ("pipeline", "context"):
        job = job_of(checkpoint, layout)
        resumed, metrics, *_ = two_ranks.run(learn, job, None, tmp_path)[0]
        assert resumed == log_probs[1:]
        assert metrics[0]["parity/num_mismatched_tokens"] == 0


def parts(job, senders):
    """Names of what is not trained, and of what is, as each rank would send them."""
    policy = make(job).policy
    both = (policy.weight_buckets(1 << 15, part, senders) for part in ("frozen", "trained"))
    return [{name for bucket in buckets for name, _ in bucket} for buckets in both]


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("qwen3", {"megatron_tp": 2}), ("qwen3", {"megatron_pp": 2}), ("mixtral", {"megatron_ep": 2})],
)
def test_after_the_first_push_adapters_alone_travel(two_ranks, model_of, architecture, layout):
    """From whichever ranks send."""
    path = model_of(architecture)
    job = job_of(path, targets="all-linear").under(layout)
    stored = load_file(path / "model.safetensors").keys()
    for rank, (frozen, trained) in enumerate(two_ranks.run(parts, job, (1,))):
        assert frozen == (stored if rank else set())
        assert bool(trained) == bool(rank) and all(map(is_adapters, trained))


def merged(job, sender=0):
    """What a push without adapters is on the rank that sends it; elsewhere nothing."""
    trainer = make(job)
    fill_with_drawn(trainer, 0)
    push = MergedPush(trainer.config.model, trainer.contract.adapter)
    both = {
        part: trainer.policy.weight_buckets(1 << 15, part, (sender,))
        for part in ("trained", "frozen")
    }
    return {name: tensor for bucket in push.buckets(both) for name, tensor in bucket}


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("qwen3", {"megatron_tp": 2}), ("qwen3", {"megatron_pp": 2}), ("mixtral", {"megatron_ep": 2})],
)
def test_merged_weights_are_those_of_the_other_engine_whichever_rank_sends_them(
    two_ranks, model_of, architecture, layout
):
    job = job_of(model_of(architecture), targets="all-linear").under(layout)
    nothing, ours = two_ranks.run(merged, job, 1)
    theirs = merged(in_the_other_engine(job))
    assert not nothing and equal(ours, theirs)
    stored = load_file(job.path / "model.safetensors")
    assert ours.keys() == stored.keys() and not equal(ours, stored)


def export(job, directory, drawn):
    """Files of the adapter, drawn or as it begins."""
    trainer = make(job)
    if drawn:
        fill_with_drawn(trainer, 0)
    trainer.export(directory)
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_the_adapter_is_written_and_read_as_by_the_other_engine(
    two_ranks, checkpoint, layout, tmp_path
):
    job = job_of(checkpoint, layout)
    ours = two_ranks.run(export, job, tmp_path / "ours", True)[0]
    theirs = export(in_the_other_engine(job), tmp_path / "theirs", True)
    assert ours == theirs and len(ours) == 2
    lora = {**job.changes["lora"], "lora_adapter": str(tmp_path / "theirs")}
    again = job.under(LAYOUTS[layout], lora=lora)
    assert two_ranks.run(export, again, tmp_path / "again", False)[0] == ours
    assert two_ranks.run(export, job, tmp_path / "first", False)[0] != ours


MIXTURES = {
    "tensor": {"megatron_tp": 2},
    "tensor and sequence": {"megatron_tp": 2, "megatron_sequence_parallel": True},
    "experts": {"megatron_ep": 2},
}
OF_FOUR = {"megatron_tp": 2, "megatron_ep": 2, "megatron_sequence_parallel": True}


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        *(("qwen3-moe", layout) for layout in MIXTURES), ("mixtral", "experts"),
        ("qwen2-moe", "tensor and sequence"), ("glm4-moe", "tensor"),
    ],
)  # fmt: skip
def test_adapters_of_experts_compute_and_learn_as_in_the_other_engine(
    two_ranks, model_of, learn_there, architecture, layout
):
    """Also those of experts that all tokens share, whole on each rank or not."""
    job = job_of(model_of(architecture), targets="all-linear").under(MIXTURES[layout])
    require_same_steps(two_ranks.run(learn, job)[0][:3], learn_there(job)[:3])


def test_adapters_read_what_their_linears_and_experts_read_in_8_bits(
    two_ranks, model_of, learn_there
):
    engine = {"rollout_activation_format": "fp8_e4m3"}
    job = job_of(model_of("qwen3-moe"), "data", "all-linear", engine=engine)
    job = job.under(MIXTURES["tensor and sequence"])
    log_probs = learn_there(job)[0]
    assert two_ranks.run(learn, job)[0][0][0] == log_probs[0]
    exact = job_of(model_of("qwen3-moe"), "data", "all-linear")
    assert learn_there(exact)[0][0] != log_probs[0]


def test_four_ranks_share_adapters_of_experts_both_ways(
    four_ranks, model_of, learn_there, tmp_path
):
    job = job_of(model_of("qwen3-moe"), targets="all-linear").under(OF_FOUR)
    whole = four_ranks.run(learn, job, tmp_path)[0]
    require_same_steps(whole[:3], learn_there(job)[:3])
    resumed = four_ranks.run(learn, job, None, tmp_path)[0]
    assert resumed[0] == whole[0][1:] and equal(resumed[2], whole[2])


@contextmanager
def weights_count_on_every_rank():
    """What is added once gets its routers' gradients from every rank."""
    from onpolicy.training.megatron.moe import AlignedExperts

    forward = AlignedExperts.forward

    def summed(self, x, weights, chosen, own_weights):
        return forward(self, x, weights, chosen, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AlignedExperts, "forward", summed)
        yield


@pytest.mark.parametrize("break_", [gradients_are_not_summed, weights_count_on_every_rank])
def test_what_is_not_summed_rightly_of_experts_is_noticed(two_ranks, model_of, learn_there, break_):
    job = job_of(model_of("qwen3-moe"), targets="all-linear").under(MIXTURES["tensor"])
    broken = two_ranks.run(partial(learn, break_=break_), job)[0]
    theirs = learn_there(job)
    with pytest.raises(AssertionError):
        require_same_steps(broken[:3], theirs[:3])


def test_what_it_has_no_adapters_for_is_refused_by_name(checkpoint):
    config, contract = load_config(str(checkpoint)), make_contract(checkpoint)
    shape = AdapterShape(rank=4, scale=1.0, targets=("latent_proj", "q_proj"))
    layout = MegatronLayout()
    layout.check(config, replace(contract, adapter=replace(shape, targets=("q_proj",))), 1)
    with pytest.raises(ConfigError, match="megatron has no adapters of latent_proj yet"):
        layout.check(config, replace(contract, adapter=shape), 1)
