"""`onpolicy explain` on a real server: chunked prefill, cached prefixes, batched decode."""

import json
import os

import pytest

from onpolicy.cli.main import main
from onpolicy.run.cases import make_case, write_case
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Sample
from tests.support.after_import import after_import
from tests.support.broken_engine import PLACES, breakable_engines
from tests.support.faults import one_ulp_in_three_rows
from tests.support.microscopes import TEMPERATURE, running_microscope
from tests.support.recorded_policies import replace_in
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import IN_RANKS, ROOT, TWO_RANKS, onpolicy

pytestmark = [pytest.mark.engine, pytest.mark.runs]

LAYER = "layers.1.mlp"


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def breaking(architecture, tmp_path_factory):
    """The file that breaks one operator of the server, while it is there."""
    with breakable_engines(architecture, tmp_path_factory.mktemp("broken")) as file:
        yield file


@pytest.fixture(scope="module")
def microscope(architecture, breaking, tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("model"), architecture)
    with running_microscope(path, tmp_path_factory.mktemp("engines")) as one:
        yield one


def test_between_aligned_engines_no_row_differs(microscope):
    result = microscope.look()
    assert result["num_mismatched_tokens"] == 0 < result["num_compared_tokens"]
    assert result["source"] is None and result["only_in_one"] == []
    sites = {(site["site"][0], site["site"][1]): site for site in result["sites"]}
    assert all(s["inputs_differ"] == s["outputs_differ"] == 0 < s["rows"] for s in sites.values())
    assert {("embed_tokens", "embedding"), ("norm", "rms_norm"), ("lm_head", "linear")} < set(sites)
    rows = {site["rows"] for name, site in sites.items() if name[0] != "lm_head"}
    assert len(rows) == 1  # every operator has computed every token


def test_a_broken_operator_of_the_trainer_is_named_and_proven(microscope, monkeypatch):
    policy = microscope.engines.trainer.policy.module
    module = f"{LAYER}.down_proj"
    if hasattr(policy.causal_lm.base_model.get_submodule(LAYER), "experts"):
        module = f"{LAYER}.experts"
    name = "grouped_partial_linear" if module.endswith("experts") else "row_parallel_linear"
    replace_in(monkeypatch, policy, module, name, one_ulp_in_three_rows)
    result = microscope.look()
    source = result["source"]
    assert source["cause"] == "operator"
    assert source["site"][0] == module and source["site"][1] in name
    assert result["proof"]["difference"]["max_ulp"] <= 1
    assert result["proof"]["verdict"] == "trainer differs"
    assert result["proof"]["in_rollout_shape"] is True


def test_a_broken_operator_of_the_server_is_named_and_proven(microscope, architecture, breaking):
    module, _, name = PLACES[architecture]
    breaking.touch()
    try:
        result = microscope.look()
    finally:
        breaking.unlink()
    assert result["num_mismatched_tokens"] > 0
    assert result["source"]["cause"] == "operator"
    assert result["source"]["site"][0] == module and result["source"]["site"][1] in name
    assert [s["site"][0] for s in result["sites"] if s["own"]] == [module]
    assert result["proof"]["verdict"] == "rollout differs"
    assert (result["proof"]["in_rollout_shape"], result["proof"]["in_train_shape"]) == (False, True)
    assert microscope.look()["num_mismatched_tokens"] == 0


def test_a_weight_that_was_not_pushed_is_named_and_proven(microscope):
    layer = microscope.engines.trainer.policy.module.layers[0]
    weight = layer.self_attn.k_proj.weight.to_local().detach()
    before = weight.clone()
    weight.mul_(1.01)
    try:
        result = microscope.look()
    finally:
        weight.copy_(before)
    assert result["num_mismatched_tokens"] > 0
    assert result["first_token"]["response_position"] == 0
    assert result["source"]["cause"] == "operator"
    assert result["source"]["site"] == ("layers.0.self_attn.k_proj", "linear", 0)
    assert result["proof"]["verdict"] == "other weights"


def test_a_case_comes_again(microscope, tmp_path, capsys):
    """The response of a run, sampled anew by the command from the file that the run left."""
    pair, request = microscope.engines, microscope.requests[0]
    (completion,) = pair.generate([request])
    prompt = Prompt(index=3, prompt_ids=request.prompt_ids, label="", text="")
    trajectory = Trajectory.begin(request.prompt_ids).plus(completion, TEMPERATURE)
    sample = Sample(prompt=prompt, sample_index=1, trajectory=trajectory)
    file, apart = tmp_path / "case", [number - 1 for number in completion.rollout_log_probs]
    write_case(make_case(request, sample, apart, 0, pair), file)
    code = main([
        "explain", "--hf-checkpoint", pair.config.model.hf_checkpoint, "--case", str(file),
        "--json", str(tmp_path / "json"), "--html", str(tmp_path / "html"),
        "--run-dir", str(tmp_path / "run"), "--cpu-threads", "1",
    ])  # fmt: skip
    (response,) = json.loads((tmp_path / "json").read_text())["responses"]
    assert code == 0
    assert response["tokens"] == completion.response_ids
    assert response["rollout_log_probs"] == completion.rollout_log_probs
    assert "other weights" not in capsys.readouterr().err
    assert "No row differs" in (tmp_path / "html").read_text()


def test_stock_engines_are_explained_by_a_command(checkpoint, tmp_path, capsys):
    file = tmp_path / "result.json"
    code = main([
        "explain", "--hf-checkpoint", str(checkpoint), "--no-true-on-policy-mode",
        "--num-prompts", "4", "--max-new-tokens", "8", "--json", str(file),
        "--run-dir", str(tmp_path / "run"), "--cpu-threads", "1",
    ])  # fmt: skip
    result = json.loads(file.read_text())
    # How many differ, and where, is up to the machine's kernels.
    assert code == (result["num_mismatched_tokens"] > 0)
    assert result["num_compared_tokens"] == 4 * 8
    names = {site["site"][1] for site in result["sites"]}
    assert names == {"embedding", "rms_norm", "linear", "rotary", "attention", "gated"}
    assert (result["source"] is None) <= (result["num_mismatched_tokens"] == 0)
    assert "tokens differ" in capsys.readouterr().out


def test_megatron_with_adapters_and_two_ranks_of_a_rollout_are_explained_by_a_command(tmp_path):
    """Between aligned engines; what is broken in them is found in tests/onpolicy/explain."""
    pytest.importorskip("megatron.core")
    file = tmp_path / "result.json"
    onpolicy(
        "explain", "--train-backend", "megatron",
        "--hf-checkpoint", make_checkpoint(tmp_path / "model", "qwen3-moe"),
        "--sglang-tp-size", "2", "--row-parallel-blocks", "2", "--num-prompts", "4",
        "--max-new-tokens", "8", "--json", file, "--run-dir", tmp_path / "run",
        "--lora-rank", "4", "--lora-target-modules", "q_proj,v_proj,o_proj",
    )  # fmt: skip
    result = json.loads(file.read_text())
    assert (result["num_mismatched_tokens"], result["num_compared_tokens"]) == (0, 32)
    assert result["source"] is None and result["only_in_one"] == []
    sites = {tuple(site["site"][:2]): site for site in result["sites"]}
    assert {("layers.1.self_attn.v_proj", "linear"), ("lm_head", "linear")} < set(sites)
    adapters = {(f"layers.1.self_attn.{x}_proj.lora", "add_scaled") for x in "qvo"}
    assert adapters < set(sites)
    assert all(s["inputs_differ"] == s["outputs_differ"] == 0 < s["rows"] for s in sites.values())


ONE_RANK_IS_BROKEN = """
import copy
from onpolicy.training import distributed
from onpolicy.training.fsdp.fsdp_model import FsdpModel
from tests.support.faults import rounded_in_between
load = FsdpModel._load
def load_and_break(self, *args):
    model = load(self, *args)
    if distributed.rank() == 1:
        module = model.causal_lm.base_model.get_submodule("layers.1.mlp.down_proj")
        module.operators = copy.copy(module.operators)
        right = module.operators.row_parallel_linear
        module.operators.row_parallel_linear = rounded_in_between(right)
    return model
FsdpModel._load = load_and_break
"""


ONE_STAGE_IS_BROKEN = """
from onpolicy.training import distributed
from onpolicy.training.megatron.megatron_model import MegatronModel
from tests.support.faults import rounded_in_between
from tests.support.recorded_megatron import broken
load = MegatronModel._load
def load_and_break(self, *args):
    model = load(self, *args)
    if distributed.rank() == 1:
        place = "decoder.layers.0.mlp.linear_fc2", "row_parallel_linear"
        self.fault = broken(model, *place, rounded_in_between)
        self.fault.__enter__()
    return model
MegatronModel._load = load_and_break
"""
"""The first layer of the second stage is the second of the model."""

MEGATRON = ("--train-backend", "megatron")
PIPELINE = (*MEGATRON, "--megatron-pp", "2")
DOWN = ("layers.1.mlp.down_proj", "linear")

TRAINERS = {"fsdp": ((), ONE_RANK_IS_BROKEN), "pipeline": (PIPELINE, ONE_STAGE_IS_BROKEN)}
"""In tests/onpolicy/explain, ranks without servers have faults in more layouts."""


@pytest.mark.parametrize(("layout", "code"), TRAINERS.values(), ids=TRAINERS)
def test_two_ranks_of_a_trainer_are_explained_by_a_command(checkpoint, tmp_path, layout, code):
    """Both of them: the second one is broken, in one layer. Fewer prompts would be all the first's."""
    backend = "megatron" if layout else "fsdp"
    if layout:
        pytest.importorskip("megatron.core")
    customize = after_import(f"onpolicy.training.{backend}.{backend}_model", code, IN_RANKS)
    (tmp_path / "sitecustomize.py").write_text(customize)
    file, paths = tmp_path / "result.json", [str(tmp_path), str(ROOT)]
    onpolicy(
        "explain", *TWO_RANKS, *layout, "--dtype", "float32",
        "--hf-checkpoint", checkpoint, "--num-prompts", "16", "--max-new-tokens", "8",
        "--json", file, "--run-dir", tmp_path / "run", "--cpu-threads", "1",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, code=1,
    )  # fmt: skip
    result = json.loads(file.read_text())
    assert result["num_compared_tokens"] == 16 * 8 and result["only_in_one"] == []
    assert result["num_mismatched_tokens"] > 0
    own = {tuple(site["site"][:2]) for site in result["sites"] if site["own"]}
    assert own == {DOWN}
    assert result["source"]["site"] == [*DOWN, 0]
    assert result["proof"]["verdict"] == "trainer differs"
