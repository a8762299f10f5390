"""A critic of another size than the policy: it fits the run's ranks, and sums count it as it is."""

import re
import shutil

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.run import saving
from onpolicy.run.launch.input_checks import require_weights
from onpolicy.run.launch.memory_model import RunMemory
from tests.support.sized_runs import make_spec
from tests.support.tiny import make_checkpoint

CRITIC = ("--advantage-estimator", "gae")


def config_of(checkpoint, *argv):
    flags = ["--hf-checkpoint", str(checkpoint), "--prompt-data", "p.jsonl", "--rm-type", "exact"]
    return parse(TrainConfig, [*flags, *argv], "onpolicy train")


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    changes = {"num_hidden_layers": 5, "intermediate_size": 416}
    return make_checkpoint(tmp_path_factory.mktemp("larger"), "qwen3", **changes)


def size_of(path):
    return ModelSize.of(load_config(str(path)))


def test_a_critic_that_cannot_be_laid_out_as_the_policy_is_refused_by_its_flag(checkpoint, larger):
    pytest.importorskip("megatron.core")
    flags = (*CRITIC, "--critic-load", str(larger))
    layout = (
        "--train-backend",
        "megatron",
        "--megatron-pp",
        "2",
        "--actor-num-ranks-per-node",
        "2",
    )
    hf_config = load_config(str(checkpoint))
    require_weights(config_of(checkpoint, *flags), hf_config)
    require_weights(config_of(checkpoint, *CRITIC, *layout), hf_config)
    with pytest.raises(ConfigError, match=rf"--critic-load={larger}: --megatron-pp=2: .*layers=5"):
        require_weights(config_of(checkpoint, *flags, *layout), hf_config)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_rank_holds_a_critic_of_its_own_size(checkpoint, larger, backend):
    parts = {}
    for name, path in (("none", None), ("policy", checkpoint), ("larger", larger)):
        flags = (*CRITIC, "--critic-load", str(path)) if path else ()
        config = config_of(checkpoint, "--train-backend", backend, *flags)
        hf_config, spec = make_spec(config, 50)
        parts[name] = RunMemory(config, hf_config, spec, size_of(checkpoint)).trainer().parts
    kept = [parts["policy"][name] for name in ("weights", "gradients", "AdamW")]
    assert parts["none"]["critic"] == 0 and parts["policy"]["critic"] == sum(kept)
    times = size_of(larger).parameters / size_of(checkpoint).parameters
    assert parts["larger"]["critic"] == pytest.approx(times * sum(kept)) and times > 1.5
    assert parts["larger"]["weights"] == parts["none"]["weights"]
    assert parts["larger"]["activations"] > parts["policy"]["activations"]
    if backend == "fsdp":
        assert parts["larger"]["gathered layers"] > parts["policy"]["gathered layers"]


def test_beside_adapters_a_rank_holds_a_critic_that_is_trained_whole(checkpoint):
    config = config_of(checkpoint, *CRITIC, "--true-on-policy-mode", "--lora-rank", "4")
    hf_config, spec = make_spec(config, 50)
    adapter = AdapterShape(rank=4, scale=1.0, targets=("q_proj",))
    adapted, whole = ModelSize.of(hf_config, adapter=adapter), size_of(checkpoint)
    parts = RunMemory(config, hf_config, spec, adapted).trainer().parts
    assert parts["critic"] == 4 * 4 * whole.parameters > 10 * parts["AdamW"]
    assert parts["holes"] == 1.25 * 4 * whole.parameters  # of the larger backward pass


def test_the_room_asked_for_is_that_of_both(checkpoint, larger, monkeypatch):
    nothing = shutil._ntuple_diskusage(0, 0, 0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: nothing)
    both = size_of(checkpoint).parameters + size_of(larger).parameters
    config = config_of(checkpoint, *CRITIC, "--critic-load", str(larger), "--save", "s")
    text = re.escape(f"{both:,} parameters of policy and critic x (12 bytes of training state + 2")
    with pytest.raises(ConfigError, match=text):
        saving.require_room(config, load_config(str(checkpoint)))
