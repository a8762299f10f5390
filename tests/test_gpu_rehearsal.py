"""What happens on a GPU's machine up to the first kernel, on one that only seems to have GPUs.

Real commands, the real Ray, the real SGLang: placement, memory, flags as SGLang resolves them, the order
of steps. Nothing is computed on the GPUs, which are fakes (tests/support/gpu/fake).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from onpolicy.contract import AttentionShape, NumericsContract, OperatorShapes
from onpolicy.rollout.engine_args import EngineSpec, engine_environment, engine_flags
from tests.examples.test_launchers import EXAMPLES, write_problems
from tests.gpu import engines
from tests.support.forked_commands import forked_commands
from tests.support.forked_processes import forked_in
from tests.support.gpu.fake_gpus import seeing_gpus
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import ROOT, onpolicy

pytestmark = pytest.mark.runs

SIZES = {
    "max_position_embeddings": 16384, "head_dim": 128, "hidden_size": 256, "intermediate_size": 256,
    "vocab_size": 512,
}  # fmt: skip
LAYERS = {"qwen3": 2, "qwen3-moe": 8}
"""Four pipeline stages share the second's out."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    made = {
        name: make_checkpoint(directory / name, name, **SIZES, num_hidden_layers=layers)
        for name, layers in LAYERS.items()
    }
    for checkpoint in made.values():
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        (checkpoint / "chat_template.jinja").write_text(template)
    return made


@pytest.fixture(scope="module")
def forked():
    """Where `onpolicy` is whose processes need not import everything anew before they see GPUs."""
    with (
        TemporaryDirectory() as directory,
        forked_in(seeing_gpus(8)),
        forked_commands(Path(directory)),
    ):
        yield directory


def launch(script, count, checkpoint, cwd, forked, *argv, chats=False):
    write_problems(cwd / "data.jsonl", chats)
    return subprocess.run(
        [str(EXAMPLES / script), *argv, "--dry-run"],
        env={
            **seeing_gpus(count),
            "PATH": f"{forked}:{os.environ['PATH']}",
            "BASH_FUNC_onpolicy%%": f'() {{ "{forked}/onpolicy" "$@"; }}',
            "HF_CHECKPOINT": str(checkpoint),
            "PROMPT_DATA": str(cwd / "data.jsonl"),
        },
        cwd=cwd, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(
    "script, model, engines",
    [
        ("run_qwen3_4b.sh", "qwen3", 8),
        ("run_qwen3_4b_ppo.sh", "qwen3", 8),
        ("run_qwen3_32b_lora.sh", "qwen3", 4),
        ("run_qwen3_30b_a3b.sh", "qwen3-moe", 8),
        ("run_qwen3_30b_a3b_megatron.sh", "qwen3-moe", 8),
    ],
)
def test_a_launcher_is_a_valid_run_on_8_gpus(tmp_path, checkpoints, forked, script, model, engines):
    done = launch(f"true_on_policy/{script}", 8, checkpoints[model], tmp_path, forked)
    assert done.returncode == 0, done.stderr
    assert "aligned operators: hopper, bfloat16" in done.stderr
    assert "the fullest GPU has 78.23 GiB free" in done.stderr
    assert f'"rollout_num_engines": {engines}' in done.stdout
    assert "1024 samples = global_batch_size 1024 x 1 optimizer steps" in done.stdout
    assert '"true_on_policy_mode": true' in done.stdout
    assert shares_all_gpus(done, engines)


def shares_all_gpus(done, engines=8):
    """Whether 8 ranks and the servers are on the same 8 GPUs, and none is left over."""
    (places,) = re.findall(r"trainer rank 0 \(GPU 0\);.*", done.stdout + done.stderr)
    gpus = {
        side: re.findall(rf"{side} \d+ \(GPU ([\d, ]+)\)", places) for side in ("rank", "engine")
    }
    numbers = {
        side: [int(n) for each in found for n in each.split(",")] for side, found in gpus.items()
    }
    return numbers["rank"] == numbers["engine"] == [*range(8)] and len(gpus["engine"]) == engines


@pytest.mark.parametrize("argv", [["dapo_math_8gpu/run.sh"], ["agents_8gpu/run.sh", "code"]])
def test_the_other_launchers_for_8_gpus_share_them_too(tmp_path, checkpoints, forked, argv):
    script, *argv = argv
    chats = script.startswith("agents")
    done = launch(script, 8, checkpoints["qwen3"], tmp_path, forked, *argv, chats=chats)
    assert done.returncode == 0, done.stderr
    assert shares_all_gpus(done)


def test_the_launcher_of_one_gpu_is_a_valid_run_on_it(tmp_path, checkpoints, forked):
    done = launch("true_on_policy/run_qwen3_4b_lora.sh", 1, checkpoints["qwen3"], tmp_path, forked)
    assert done.returncode == 0, done.stderr
    assert "memory of a shared GPU while servers sample" in done.stderr
    assert '"lora_rank": 32' in done.stdout and '"colocate": true' in done.stdout


CHECK = """
import sys
from pathlib import Path
from onpolicy.cli.command import begin
from onpolicy.cli.main import main
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.run.commands.verification import check_inputs
from onpolicy.run.launch.input_checks import fit_verify
from tests.gpu.engines import commands
here, *names = map(Path, sys.argv[1:])
for name in map(str, names):
    command, *flags = commands(here, here / "logs")[name]
    if command == "train":
        assert main([command, *flags, "--dry-run"]) == 0, name
    else:
        check_inputs(fit_verify(begin(VerifyConfig, flags, "onpolicy verify")))
    print("VALID", name)
"""


def test_commands_of_the_engines_suite_are_valid_on_one_gpu(tmp_path, checkpoints, forked):
    """One of each sort; SGLang reads the flags of each for seconds."""
    names = ["train_hopper", "verify_fp8", "lora_hopper"]
    (tmp_path / "qwen3-0.6b").symlink_to(checkpoints["qwen3"])
    write_problems(tmp_path / "data.jsonl")
    (tmp_path / "check.py").write_text(CHECK)
    seeing = seeing_gpus(1)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "check.py"), str(tmp_path), *names],
        env={**seeing, "PYTHONPATH": f"{seeing['PYTHONPATH']}:{ROOT}"}, cwd=ROOT,
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    valid = [line for line in done.stdout.splitlines() if line.startswith("VALID")]
    assert valid == [f"VALID {name}" for name in names]


def result(**changes):
    return {
        "exit_code": 0, "num_compared_tokens": 9, "num_mismatched_tokens": 0, "seconds": 1.0,
        **changes,
    }  # fmt: skip


def test_the_engines_suite_names_what_did_not_hold():
    good = {"verify_int4": result(), "verify_fp8": result()}
    assert not engines.failures(good)
    for changes in ({"exit_code": 1}, {"num_mismatched_tokens": 2}, {"num_compared_tokens": 0}):
        (failure,) = engines.failures({**good, "verify_fp8": result(**changes)})
        assert failure.startswith("verify_fp8: exit code")


def test_the_engines_suite_reads_what_commands_leave_behind(tmp_path):
    """A command that is refused, and the records of others."""
    refused = engines.run("verify_fp8", ["verify"], tmp_path)
    assert refused["exit_code"] == 2 and "hf-checkpoint" in " ".join(refused["last_lines"])
    (tmp_path / "verify.json").write_text(
        json.dumps({"num_compared_tokens": 8, "num_mismatched_tokens": 1})
    )
    (tmp_path / "train").mkdir()
    step = {"step": 0, "parity/num_compared_tokens": 8, "parity/num_mismatched_tokens": 1}
    (tmp_path / "train" / "metrics.jsonl").write_text(f"{json.dumps(step)}\n" * 2 + "{}\n")
    assert [*engines._compared(tmp_path, "verify").values()] == [8, 1]
    assert [*engines._compared(tmp_path, "train").values()] == [16, 2]


RESOLVE = """
import json, sys
from sglang_patches.server_process import import_lightly
import_lightly()
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from sglang_patches import registry
load_plugins()
registry.require_active()
server_args = prepare_server_args(sys.argv[1:])
server_args.resolve_once()
server_args.check_server_args()
view = resolving_view(server_args)
found = {name: getattr(view, name) for name in (
    "attention_backend", "page_size", "sampling_backend", "disable_radix_cache", "base_gpu_id",
    "disable_overlap_schedule", "disable_custom_all_reduce", "enable_deterministic_inference",
    "chunked_prefill_size", "tp_size",
)} | {"decode": list(view.cuda_graph_config.decode.bs)}
print("RESOLVED", json.dumps(found))
"""


STEPS = """
import json, os, sys
from onpolicy.compat.process import prepare_process
prepare_process()
from benchmarks.gpu_quarter.decode_steps import engine
flags, variables = engine(sys.argv[1], sys.argv[2], [(8, 1024), (1, 8192)])
os.environ.update(variables)
sys.argv[1:] = flags
"""


def resolved(directory, code, argv, variables):
    """What the code prints of SGLang's settings."""
    (directory / "resolve.py").write_text(code)
    path = f"{variables['PYTHONPATH']}:{ROOT}"
    done = subprocess.run(
        [sys.executable, str(directory / "resolve.py"), *argv],
        env={**variables, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESOLVED")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESOLVED"))


@pytest.mark.parametrize("kind", ["hopper", "deterministic"])
def test_sglang_captures_the_steps_that_are_measured_in_process(
    tmp_path, checkpoints, forked, kind
):
    argv = [kind, str(checkpoints["qwen3"])]
    found = resolved(tmp_path, STEPS + RESOLVE, argv, seeing_gpus(1))
    assert found["decode"] == [1, 8] and found["enable_deterministic_inference"]


def test_sglang_makes_of_our_flags_what_the_docs_say(tmp_path, checkpoints, forked):
    """Pages of a token, the radix cache and the overlap schedule on, decoding in graphs up to 256."""
    kind = AttentionShape(heads=2, kv_heads=1, head_dim=128, value_dim=128)
    shapes = OperatorShapes(linear=(), attention=(kind,), norm=(256,), vocab_size=512)
    contract = NumericsContract(
        backend="triton", device="cuda", dtype="bfloat16", shapes=shapes, row_parallel_blocks=2
    )
    spec = EngineSpec(
        hf_checkpoint=str(checkpoints["qwen3"]), contract=contract, host="127.0.0.1", api_key="",
        seed=0, num_threads=1, first_gpu=4, trust_remote_code=False, sglang_args=("--tp-size", "2"),
    )  # fmt: skip
    variables = {**seeing_gpus(8), **engine_environment(spec)}
    found = resolved(tmp_path, RESOLVE, engine_flags(spec, 30000), variables)
    graphs = found.pop("decode")
    assert graphs[0] == 1 and graphs[-1] == 256
    assert found == {
        "attention_backend": "fa3", "page_size": 1, "sampling_backend": "pytorch",
        "disable_radix_cache": False, "base_gpu_id": 4, "disable_overlap_schedule": False,
        "disable_custom_all_reduce": True, "enable_deterministic_inference": True,
        "chunked_prefill_size": 8192, "tp_size": 2,
    }  # fmt: skip


def test_verify_on_one_gpu_goes_as_far_as_the_engines_scheduler(tmp_path, checkpoints, forked):
    """Places both sides on the GPU, starts the server, and says that it cannot compute; none is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    argv = ["--hf-checkpoint", str(checkpoints["qwen3"]), "--colocate", "--operators", "triton"]
    seeing = {"env": seeing_gpus(1), "cwd": tmp_path}
    said = onpolicy("verify", *argv, "--max-prompt-len", "64", code=1, **seeing).stderr
    steps = [
        "aligned operators: triton, bfloat16",
        "memory of trainer rank",
        "memory of SGLang server",
        "trainer rank 0 (GPU 0); engine 0 (GPU 0)",
        "starting an SGLang server",
        "EngineError: the engine at",
        "scheduler died during initialization",
    ]
    places = [said.find(step) for step in steps]
    assert -1 not in places and places == sorted(places), said
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before


def test_a_run_asks_for_no_more_gpus_than_there_are(tmp_path, checkpoints, forked):
    write_problems(tmp_path / "data.jsonl")
    given = ["--hf-checkpoint", str(checkpoints["qwen3"]), "--prompt-data", "data.jsonl"]
    asked = ["--actor-num-gpus-per-node", "2", "--rollout-num-engines", "2"]
    seeing = {"env": seeing_gpus(3), "cwd": tmp_path}
    done = onpolicy(
        "train", "--rm-type", "math", "--true-on-policy-mode", *given, *asked, code=2, **seeing
    )
    assert "there are 3 GPUs" in done.stderr
