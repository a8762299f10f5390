"""What `onpolicy explain` takes from a case and from a checkpoint, and what it refuses."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from onpolicy.cli.main import main
from onpolicy.config.groups import ModelConfig
from onpolicy.config.tool_flags import ExplainConfig
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.explain.explain_inputs import with_case
from onpolicy.run.cases import Case, read_case, write_case
from onpolicy.run.saving.checkpoint import STATE, name_of
from onpolicy.system.records import Shape
from onpolicy.trajectory import Trajectory
from onpolicy.types import SamplingParams
from tests.support.changed_json import changes
from tests.support.samples import make_completion
from tests.support.tiny_contract import CONTRACT

ANSWERED = Trajectory.begin([5, 6, 7]).plus(make_completion([8, 9], [-0.5, -1.0]), 0.7)

CASE = json.loads(
    Shape(Case).write(
        Case(
            sample="rollout 2",
            train_log_probs=[-0.5, float("nan")],
            weight_digest="a",
            trajectory=ANSWERED,
            sampling_seed=11,
            step=2,
            prompt_len=3,
            params=SamplingParams(temperature=0.7, max_new_tokens=4, stop_token_ids=(1,)),
            contract=dataclasses.replace(CONTRACT, dtype="float32", row_parallel_blocks=2),
        )
    )
)

ADAPTER = AdapterShape(rank=2, scale=3.0, targets=("q_proj",))


@pytest.fixture
def case(tmp_path):
    file = tmp_path / "case.json"
    file.write_text(json.dumps(CASE))
    return file


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of rollouts 1, 2 and 4."""
    for number in (1, 2, 4):
        directory = tmp_path / "save" / name_of(number)
        directory.mkdir(parents=True)
        (directory / STATE).write_text("{}")
    return tmp_path / "save"


def test_a_case_says_how_it_was_sampled(case):
    config = with_case(ExplainConfig(case=str(case), model=ModelConfig(hf_checkpoint="m")))
    assert (config.temperature, config.model.dtype) == (0.7, "float32")
    assert config.true_on_policy_mode and config.operators.row_parallel_blocks == 2
    request = read_case(case).request
    assert (request.prompt_ids, request.sampling_seed) == ([5, 6, 7], 11)
    assert request.params == SamplingParams(
        temperature=0.7, max_new_tokens=4, stop_token_ids=(1,), top_p=1.0, top_k=-1, min_p=0.0
    )


def test_weights_are_those_of_the_cases_rollout(case, saved, caplog):
    def weights(**flags):
        return with_case(ExplainConfig(load=str(saved), **flags)).model.hf_checkpoint

    assert weights(case=str(case)) == str(saved / name_of(2) / "hf")
    assert weights() == str(saved / name_of(4) / "hf")
    assert caplog.text == ""
    case.write_text(json.dumps({**CASE, "step": 3}))
    assert weights(case=str(case)) == str(saved / name_of(4) / "hf")
    assert "has no checkpoint of rollout 3" in caplog.text
    one = with_case(ExplainConfig(load=str(saved / name_of(1))))
    assert one.model.hf_checkpoint == str(saved / name_of(1) / "hf")


def test_a_case_of_adapters_takes_those_of_its_checkpoint_beside_the_base(case, saved):
    contract = {**CASE["contract"], "adapter": dataclasses.asdict(ADAPTER)}
    case.write_text(json.dumps({**CASE, "contract": contract}))
    base = ModelConfig(hf_checkpoint="base")
    with pytest.raises(
        ConfigError, match=r"--case=.*: was sampled with adapters\. Give them by --load"
    ):
        with_case(ExplainConfig(case=str(case), model=base))
    adapter = saved / name_of(2) / "hf"
    adapter.mkdir()
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "use_rslora": True}
    (adapter / "adapter_config.json").write_text(json.dumps(told))
    factor = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({factor: torch.zeros(2, 4)}, adapter / "adapter_model.safetensors")
    config = with_case(ExplainConfig(case=str(case), load=str(saved), model=base))
    assert config.model.hf_checkpoint == "base"
    assert (config.lora.lora_rank, config.lora.lora_rslora) == (2, True)
    assert config.lora.lora_adapter == str(adapter)


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int8"), ("weight_format", "x"), ("activation_format", "int8")]
)
def test_a_contract_that_no_flags_ask_for_is_refused(case, field, value):
    case.write_text(json.dumps({**CASE, "contract": {**CASE["contract"], field: value}}))
    with pytest.raises(ConfigError, match=rf"--case=.*contract: {field}='{value}'"):
        read_case(case)


def test_a_case_is_read_as_it_was_written(tmp_path, case):
    read = read_case(case)
    write_case(read, tmp_path / "again.json")
    again = read_case(tmp_path / "again.json")
    assert repr(again) == repr(read)  # NaN is not equal to itself


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"prompt_ids": [1]}', "\x00"])
def test_what_is_no_case_is_refused(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^--case={file}: .*RUN_DIR/cases"):
        read_case(file)


def limits_of(case):
    """The windows and caps of a case's attentions, of which each may be None; None for another shape."""
    try:
        return [
            (each["window"], each["softcap"]) for each in case["contract"]["shapes"]["attention"]
        ]
    except (KeyError, TypeError):
        return None


def is_of_another_contract(changed):
    """Whether an attention has lost its window or its cap: that is a case of the same shape."""
    ours, theirs = str(limits_of(CASE)), limits_of(changed)
    return theirs is not None and str(theirs).count("None") > ours.count("None")


@given(data=st.data())
def test_a_case_of_another_shape_is_refused_by_name(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "changed.json"
    changed = data.draw(changes(CASE).filter(lambda case: not is_of_another_contract(case)))
    file.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=rf"^--case={file}: .*RUN_DIR/cases"):
        read_case(file)


def test_a_directory_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--load=.*: holds no checkpoint\. Give"):
        with_case(ExplainConfig(load=str(tmp_path)))


def test_a_server_that_runs_elsewhere_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    url = "http://127.0.0.1:9"
    assert main(["explain", "--hf-checkpoint", "m", "--rollout-server-url", url]) == 2
    assert f"ConfigError: --rollout-server-url={url}: " in capsys.readouterr().err
