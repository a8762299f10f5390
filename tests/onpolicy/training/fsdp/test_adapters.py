"""A trainer of adapters: what moves and is kept, and that the package peft computes the same."""

import dataclasses
import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from onpolicy.cli.main import main
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.models.lora.adapters import adapters
from onpolicy.models.size import trainable_parameters
from tests.onpolicy.training.fsdp.test_trainer import RATES, make, make_samples, maker_of, weights
from tests.support.tiny import make_checkpoint

__all__ = ["make"]

LORA = {"lora_rank": 8, "lora_target_modules": "q_proj,down_proj,lm_head"}


@pytest.fixture
def lora(make):
    def make_one(**changes):
        return make(lora=LORA, **changes)

    return make_one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_first_log_probabilities_are_those_of_the_base(lora, make, dtype):
    """Until B is no longer zero, and then they are not."""
    adapted, base = lora(dtype=dtype), make(dtype)
    sampled = [s.rollout_log_probs for s in make_samples(base)]
    assert [s.rollout_log_probs for s in make_samples(adapted)] == sampled
    adapted.train(make_samples(adapted), 0, RATES)
    assert [s.rollout_log_probs for s in make_samples(adapted)] != sampled


def test_adapters_alone_move_and_have_optimizer_state(lora):
    trainer = lora()
    before = weights(trainer)
    frozen = trainer.policy.frozen_digest()
    for step in (0, 1):  # A has no gradient as long as B is zero
        metrics = trainer.train(make_samples(trainer), step, RATES).metrics
        assert metrics["parity/num_mismatched_tokens"] == 0
    moved = {n for n, x in weights(trainer).items() if not torch.equal(before[n], x)}
    names = {n for n in before if ".lora." in n}
    held = [*adapters(trainer.policy.module)]
    assert moved == names and len(names) == sum(len(adapter.state_dict()) for adapter in held)
    assert trainer.policy.frozen_digest() == frozen
    state = trainer.policy.optimizer.state
    trained = sum(len([*adapter.parameters()]) for adapter in held)
    assert len(state) == trained == len(trainable_parameters(trainer.policy.module))


def test_the_base_and_a_reference_are_held_in_the_dtype_that_is_computed_in(lora, make, checkpoint):
    """Masters of full training are float32; what is pushed has the same bits."""
    trainer, whole = lora(dtype="bfloat16"), make("bfloat16")
    for name, parameter in trainer.policy.module.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora." in name else torch.bfloat16)
    held = weights(trainer)
    assert all(torch.equal(held[name], x) for name, x in weights(whole).items())
    algorithm = {"use_kl_loss": True, "ref_checkpoint": str(checkpoint)}
    reference = make("bfloat16", algorithm=algorithm).models["reference"]
    assert {p.dtype for p in reference.module.parameters()} == {torch.bfloat16}


def test_a_checkpoint_holds_adapters_alone_and_goes_on_with_the_same_bits(lora, tmp_path):
    whole, first, second = lora(), lora(), lora()
    for trainer in (whole, first):
        trainer.train(make_samples(trainer), 0, RATES)
    first.save(tmp_path)
    assert all(".lora." in n for n in first.policy._tensors() if n.startswith("model."))
    second.load(tmp_path)
    for trainer in (whole, second):
        trainer.train(make_samples(trainer, seed=1), 1, RATES)
    assert all(torch.equal(weights(whole)[name], x) for name, x in weights(second).items())


def test_the_reference_is_the_base_in_the_same_memory(lora, make):
    algorithm = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    trainer = lora(algorithm=algorithm)
    reference = trainer.models["reference"]
    assert reference.module is trainer.policy.module and reference.optimizer is None
    trainer.train(make_samples(trainer), 0, RATES)
    samples = make_samples(trainer)
    base = make_samples(make())
    assert samples[0].rollout_log_probs != base[0].rollout_log_probs
    policy, trainer.models["policy"] = trainer.policy, reference
    assert make_samples(trainer)[0].rollout_log_probs == base[0].rollout_log_probs
    trainer.models["policy"] = policy
    assert make_samples(trainer)[0].rollout_log_probs == samples[0].rollout_log_probs


def test_memory_that_the_reference_shares_is_not_taken_away_with_the_others(lora):
    trainer = lora(algorithm={"use_kl_loss": True, "kl_loss_coef": 0.5})
    kept = []
    trainer._away["state"].take = lambda tensors, dropped: kept.extend(tensors)
    trainer.release_memory("state")
    assert not any(p is x for p in trainer.policy.module.parameters() for x in kept)


def test_adapters_of_experts_move_alone(tmp_path):
    """And at first every log-probability is the base's."""
    mixture = make_checkpoint(tmp_path / "moe", "glm4-moe")
    trainer = maker_of(mixture)(lora={"lora_rank": 4})
    sampled = [s.rollout_log_probs for s in make_samples(maker_of(mixture)())]
    assert [s.rollout_log_probs for s in make_samples(trainer)] == sampled
    before = weights(trainer)
    for step in (0, 1):
        metrics = trainer.train(make_samples(trainer), step, RATES).metrics
        assert metrics["parity/num_mismatched_tokens"] == 0
    moved = {n for n, x in weights(trainer).items() if not torch.equal(before[n], x)}
    assert moved == {n for n in before if ".lora." in n}
    assert {n.rpartition(".lora.")[2] for n in moved if ".experts." in n} == {
        f"{pair}.{part}" for pair in ("gate_up", "down") for part in "AB"
    }
    assert [s.rollout_log_probs for s in make_samples(trainer)] != sampled


CLOSE = 1e-5
"""Between log-probabilities of float32 models that sum in other orders."""

KINDS = {
    "all linears": {},
    "named ones": {"lora_target_modules": "q_proj,down_proj"},
    "rsLoRA": {"lora_rslora": True, "lora_alpha": 4.0},
    "the output projection": {"lora_target_modules": "q_proj,up_proj,down_proj,lm_head"},
}


def drawn(trainer):
    """The trainer, with adapters that change every log-probability."""
    torch.manual_seed(0)
    with torch.no_grad():
        for adapter in adapters(trainer.policy.module):
            for name, factor in adapter.named_parameters():
                if name.endswith("B"):
                    factor.to_local().normal_(std=0.05)
    return trainer


def scored(samples, model):
    """Log-probabilities of the samples' sampled tokens by a model of transformers."""
    found = []
    for sample in samples:
        ids, asked = torch.tensor(sample.token_ids), len(sample.rollout_log_probs)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        table = torch.log_softmax(logits[:-1], dim=-1)
        found.append(table.gather(1, ids[1:, None])[-asked:, 0])
    return torch.cat(found)


def ours(samples):
    return torch.tensor([x for s in samples for x in s.rollout_log_probs])


def read_by_peft(checkpoint, adapter, samples):
    """PEFT's model, which gives our log-probabilities, as the base alone does not."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    without = scored(samples, base)
    model = peft.PeftModel.from_pretrained(base, adapter)
    assert (scored(samples, model) - ours(samples)).abs().max() < CLOSE
    assert (without - ours(samples)).abs().max() > 100 * CLOSE
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_with_what_we_wrote_what_we_compute(make, checkpoint, tmp_path, kind):
    trainer = drawn(make(lora={"lora_rank": 4, **KINDS[kind]}))
    samples = make_samples(trainer)
    trainer.export(tmp_path / "adapter")
    model = read_by_peft(checkpoint, tmp_path / "adapter", samples)
    assert model.peft_config["default"].base_model_name_or_path == str(checkpoint)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.scaling["default"] *= 1.01
    assert (scored(samples, model) - ours(samples)).abs().max() > 10 * CLOSE


@pytest.fixture
def mixture(tmp_path):
    return make_checkpoint(tmp_path / "moe", "glm4-moe")


def test_peft_reads_the_adapters_of_experts(mixture, tmp_path):
    trainer = drawn(maker_of(mixture)(lora={"lora_rank": 4}))
    samples = make_samples(trainer)
    trainer.export(tmp_path / "adapter")
    model = read_by_peft(mixture, tmp_path / "adapter", samples)
    experts = model.base_model.model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.base_layer.lora_B["default"].weight.mul_(1.01)  # of gate and up
    assert (scored(samples, model) - ours(samples)).abs().max() > 10 * CLOSE


def test_what_peft_writes_with_magnitudes_is_refused_with_the_remedy(checkpoint, tmp_path):
    """Its configuration says so, and if it does not, the file of factors does."""
    make_peft(checkpoint, tmp_path, target_modules=["q_proj"], use_dora=True)
    argv = ["--lora-adapter", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"use_dora=True is DoRA.*merge_and_unload"):
        parse(TrainConfig, argv, "onpolicy train")
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**told, "use_dora": False}))
    with pytest.raises(
        ConfigError, match=r"lora_magnitude_vector, a magnitude of DoRA.*merge_and_unload"
    ):
        parse(TrainConfig, argv, "onpolicy train")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_of_experts_that_were_written_and_are_read_again_have_the_same_bits(
    mixture, tmp_path, dtype
):
    make = maker_of(mixture)
    trainer = drawn(make(lora={"lora_rank": 4}, model={"dtype": dtype}))
    trainer.export(tmp_path / "adapter")
    flags = parse(TrainConfig, ["--lora-adapter", str(tmp_path / "adapter")], "onpolicy train").lora
    assert "experts" in flags.lora_target_modules.split(",")
    again = make(lora=dataclasses.asdict(flags), model={"dtype": dtype})
    again.export(tmp_path / "again")
    files = (tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "again"))
    assert len({file.read_bytes() for file in files}) == 1
    if dtype == "float32":
        assert all(torch.equal(weights(trainer)[name], x) for name, x in weights(again).items())


OPTIONS = {
    "all linears": {"target_modules": "all-linear"},
    "named ones": {"target_modules": ["v_proj", "up_proj"], "lora_dropout": 0.1},
    "rsLoRA": {"target_modules": r".*\.(q|k)_proj", "use_rslora": True},
    "the output projection": {"target_modules": ["q_proj", "down_proj", "lm_head"]},
    "beside biases": {"target_modules": "all-linear"},
}


OF_EXPERTS = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
}


def make_peft(checkpoint, directory, **options):
    """An adapter that PEFT made, and wrote into a directory; the model of transformers with it."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(directory, save_embedding_layers=False)
    return model


@pytest.mark.parametrize("kind", [*OPTIONS, "experts"])
def test_we_compute_with_what_peft_wrote_what_peft_computes(make, checkpoint, tmp_path, kind):
    if kind in ("experts", "beside biases"):
        kinds = {"experts": "qwen3-moe", "beside biases": "qwen2"}
        checkpoint = make_checkpoint(tmp_path / "other", kinds[kind])
        make = maker_of(checkpoint)
    model = make_peft(checkpoint, tmp_path, **{**OPTIONS, "experts": OF_EXPERTS}[kind])
    flags = parse(TrainConfig, ["--lora-adapter", str(tmp_path)], "onpolicy train").lora
    trainer = make(lora=dataclasses.asdict(flags))
    samples = make_samples(trainer)
    assert (scored(samples, model) - ours(samples)).abs().max() < CLOSE
    with model.disable_adapter():
        assert (scored(samples, model) - ours(samples)).abs().max() > 100 * CLOSE


@pytest.mark.parametrize("matrix", ["gate_up_proj", "down_proj"])
def test_an_adapter_of_one_matrix_of_experts_is_refused(tmp_path, matrix):
    checkpoint = make_checkpoint(tmp_path / "moe", "qwen3-moe")
    parameters = {"target_modules": ["q_proj"], "target_parameters": [f"experts.{matrix}"]}
    make_peft(checkpoint, tmp_path, **parameters)
    flags = parse(TrainConfig, ["--lora-adapter", str(tmp_path)], "onpolicy train").lora
    rule = r"experts.*lora.A is .* there, and this model needs \[24, .* beside both matrices of experts"
    with pytest.raises(ConfigError, match=rule):
        maker_of(checkpoint)(lora=dataclasses.asdict(flags))


@pytest.mark.parametrize("kind", ["all linears", "the output projection"])
def test_what_was_written_and_is_read_again_has_the_same_bits(make, tmp_path, kind):
    flags = {"lora_rank": 4, **KINDS[kind]}
    trainer = drawn(make(lora=flags))
    trainer.export(tmp_path / "adapter")
    again = make(lora={**flags, "lora_adapter": str(tmp_path / "adapter")})
    assert all(torch.equal(weights(trainer)[name], x) for name, x in weights(again).items())
    assert not torch.equal(ours(make_samples(trainer)), ours(make_samples(make())))


@pytest.mark.parametrize("kind", ["all linears", "experts", "the output projection"])
def test_peft_merges_to_what_export_writes(checkpoint, tmp_path, kind):
    options = OPTIONS.get(kind, OF_EXPERTS)
    if kind == "experts":
        checkpoint = make_checkpoint(tmp_path / "moe", "qwen3-moe")
    model = make_peft(checkpoint, tmp_path / "adapter", **options)
    given = ["--merge", str(tmp_path / "adapter"), "--output", str(tmp_path / "out")]
    assert main(["export", "--hf-checkpoint", str(checkpoint), *given, "--dtype", "float32"]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in model.merge_and_unload().state_dict().items():
        assert torch.allclose(ours[name], tensor, rtol=0, atol=1e-6), name
    base = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    changed = {name for name, tensor in base.items() if not torch.equal(ours[name], tensor)}
    adapted = {"gate_up_proj", "down_proj"} if kind == "experts" else {"weight"}
    assert adapted <= {name.rpartition(".")[2] for name in changed}
