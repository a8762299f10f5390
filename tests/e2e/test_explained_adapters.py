"""`onpolicy explain` on a real server whose linears have adapters."""

import json

import pytest

from onpolicy.cli.main import main
from onpolicy.config.groups import LoraConfig
from onpolicy.config.tools import VerifyConfig
from onpolicy.run.commands.verify import draw_adapters
from tests.support.microscopes import running_microscope
from tests.support.tiny import make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.runs]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def adapted(request, checkpoint, tmp_path_factory):
    """A dense model with adapters and magnitudes, whose B is not zero."""
    engine = {"tp_size": request.param, "lora": LoraConfig(lora_rank=4, lora_dora=True)}
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
    for name in ("self_attn.q_proj", "mlp.gate_proj"):
        module = f"layers.1.{name}.lora"
        assert {(module, "linear", 0), (module, "linear", 1), (module, "add_scaled", 0)} < sites


@pytest.mark.parametrize(
    ("module", "held", "operator"),
    [
        ("self_attn.k_proj", "B", ("linear", 1)),
        ("mlp.down_proj", "B", ("linear", None)),
        ("mlp.gate_proj", "magnitude.norm", ("add_scaled", 0)),
    ],
)
def test_what_was_not_pushed_of_an_adapter_is_named_and_proven(adapted, module, held, operator):
    layer = adapted.engines.trainer.policy.module.layers[1]
    tensor = layer.get_submodule(f"{module}.lora").state_dict()[held]
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    before = tensor.clone()
    tensor[5].mul_(1.01)
    try:
        result = adapted.look()
    finally:
        tensor.copy_(before)
    assert result["num_mismatched_tokens"] > 0
    name, *where = result["source"]["site"]
    assert result["source"]["cause"] == "operator" and name == f"layers.1.{module}.lora"
    assert where[0] == operator[0] and operator[1] in (None, where[1])
    assert result["proof"]["verdict"] == "other weights"


def test_adapters_are_explained_by_a_command(checkpoint, tmp_path, capsys):
    code = main([
        "explain", "--hf-checkpoint", str(checkpoint), "--lora-rank", "4", "--num-prompts", "4",
        "--max-new-tokens", "8", "--json", str(tmp_path / "json"),
        "--run-dir", str(tmp_path / "run"), "--cpu-threads", "1",
    ])  # fmt: skip
    result = json.loads((tmp_path / "json").read_text())
    assert code == 0 and result["num_compared_tokens"] == 4 * 8
    assert any(site["site"][1] == "add_scaled" for site in result["sites"])
    assert "No row differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "argv", "rule"),
    [
        (
            "qwen3",
            ["--lora-target-modules", "q_proj,lm_head"],
            "output projection's is not recorded",
        ),
        ("qwen3-moe", ["--sglang-tp-size", "2"], "of experts they are not recorded"),
    ],
)
def test_adapters_that_are_not_recorded_are_refused(tmp_path, capsys, name, argv, rule):
    path = make_checkpoint(tmp_path / "model", name)
    argv = ["--lora-rank", "4", *argv, "--run-dir", str(tmp_path / "run"), "--cpu-threads", "1"]
    assert main(["explain", "--hf-checkpoint", str(path), *argv]) == 2
    assert f"--lora-target-modules={'all-linear' if 'moe' in name else argv[3]}: of" in (
        said := capsys.readouterr().err
    )
    assert rule in said
