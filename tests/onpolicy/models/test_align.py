"""Which modules of a model are given operators, of which kinds."""

import pytest
from transformers import AutoModelForCausalLM

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


def kinds_of(path):
    """The kinds of the modules that hold operators."""
    model = AutoModelForCausalLM.from_pretrained(path)
    align_modules(model, CpuOperators(1))
    holders = [(name, m) for name, m in model.named_modules() if hasattr(m, "operators")]
    rewritten = {"self_attn": "rotary", "mlp": "experts" if has_experts(model) else "activation"}
    return {CLASSES.get(type(m)) or rewritten[name.rpartition(".")[2]] for name, m in holders}


def has_experts(model):
    return any("experts" in name for name, _ in model.named_modules())


def test_modules_of_every_kind_are_replaced(path):
    """Aligned experts take their activation along."""
    own = "experts" if "moe" in (path / "config.json").read_text() else "activation"
    assert kinds_of(path) == {"linear", "norm", "rotary", own}
