"""`onpolicy explain` on a real server whose linears have adapters."""

import pytest

from onpolicy.cli.main import main
from onpolicy.config.groups import LoraConfig
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.run.commands.verification import draw_adapters
from tests.support.microscopes import running_microscope
from tests.support.tiny import make_checkpoint

LINEARS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head"

pytestmark = [pytest.mark.engine, pytest.mark.runs]


@pytest.fixture(scope="module")
def adapted(checkpoint, tmp_path_factory):
    """A dense model with adapters, whose B is not zero, on two ranks of a server.

    On one rank: tests/onpolicy/explain/test_every_fault_is_found.py.
    """
    lora = LoraConfig(lora_rank=4, lora_target_modules=LINEARS)
    engine = {"tp_size": 2, "lora": lora}
    with running_microscope(checkpoint, tmp_path_factory.mktemp("engines"), **engine) as microscope:
        pair = microscope.engines
        draw_adapters(pair, VerifyConfig(lora=pair.config.lora))
        pair.push_weights(1)
        yield microscope


def test_what_adapters_compute_is_recorded_and_no_row_differs(adapted):
    result = adapted.look()
    assert result["num_mismatched_tokens"] == 0 < result["num_compared_tokens"]
    assert result["source"] is None and result["only_in_one"] == []
    sites = {tuple(site["site"]) for site in result["sites"] if site["rows"]}
    for name in ("layers.1.self_attn.q_proj", "layers.1.mlp.gate_proj", "lm_head"):
        module = f"{name}.lora"
        assert {(module, "linear", 0), (module, "linear", 1), (module, "add_scaled", 0)} < sites


@pytest.mark.parametrize(
    ("module", "operator"),
    [
        ("layers.1.self_attn.k_proj", ("linear", 1)),
        ("layers.1.mlp.down_proj", ("linear", None)),
        ("lm_head", ("linear", 1)),
    ],
)
def test_what_was_not_pushed_of_an_adapter_is_named_and_proven(adapted, module, operator):
    modules = adapted.engines.trainer.policy.module.named_modules()
    (adapter,) = (found for name, found in modules if name.endswith(f".{module}.lora"))
    tensor = adapter.state_dict()["B"]
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    before = tensor.clone()
    tensor[5].mul_(1.01)
    try:
        result = adapted.look()
    finally:
        tensor.copy_(before)
    assert result["num_mismatched_tokens"] > 0
    name, *where = result["source"]["site"]
    assert result["source"]["cause"] == "operator" and name == f"{module}.lora"
    assert where[0] == operator[0] and operator[1] in (None, where[1])
    assert result["proof"]["verdict"] == "other weights"


@pytest.mark.parametrize("sharing", [
    ["--sglang-tp-size", "2"],
    ["--train-backend", "megatron", "--megatron-ep", "2", "--actor-num-ranks-per-node", "2"],
])  # fmt: skip
def test_adapters_of_experts_that_ranks_share_are_refused(tmp_path, capsys, sharing):
    path = make_checkpoint(tmp_path / "model", "qwen3-moe")
    argv = ["--lora-rank", "4", "--cpu-threads", "1", *sharing]
    argv += ["--run-dir", str(tmp_path / "run")]
    assert main(["explain", "--hf-checkpoint", str(path), *argv]) == 2
    said = capsys.readouterr().err
    assert "--lora-target-modules=all-linear: adapters of experts are not recorded" in said
