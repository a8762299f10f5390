"""Which modules of a model are given operators, of which kinds."""

import pytest
from transformers import AutoModelForCausalLM

from onpolicy.contract import KINDS
from onpolicy.models.align import AlignedActivation, AlignedLinear, align_modules
from onpolicy.models.experts import AlignedExperts
from onpolicy.models.norms import AlignedLayerNorm, AlignedRMSNorm
from onpolicy.ops.cpu import CpuOperators
from tests.support.tiny import make_checkpoint

CLASSES = {
    AlignedLinear: "linear",
    AlignedRMSNorm: "norm",
    AlignedLayerNorm: "norm",
    AlignedActivation: "activation",
    AlignedExperts: "experts",
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def path(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def kinds_of(path, **chosen):
    """The kinds of the modules that hold operators."""
    model = AutoModelForCausalLM.from_pretrained(path)
    align_modules(model, CpuOperators(1), **chosen)
    holders = [(name, m) for name, m in model.named_modules() if hasattr(m, "operators")]
    rewritten = {"self_attn": "rotary", "mlp": "experts" if has_experts(model) else "activation"}
    return {CLASSES.get(type(m)) or rewritten[name.rpartition(".")[2]] for name, m in holders}


def has_experts(model):
    return any("experts" in name for name, _ in model.named_modules())


def test_all_of_them_unless_told(path):
    """Aligned experts take their activation along."""
    other = {"experts"} if absent(path) else {"activation"}
    assert kinds_of(path) == set(KINDS) - {"model", "attention", "log_probs"} - other


@pytest.mark.parametrize("kind", KINDS)
def test_those_of_one_kind(path, kind):
    """Attention and the sampler are no modules of the model."""
    here = {kind} - {"model", "attention", "log_probs"} - absent(path)
    assert kinds_of(path, kinds=("model", kind)) == here


def absent(path):
    return set() if "moe" in (path / "config.json").read_text() else {"experts"}
