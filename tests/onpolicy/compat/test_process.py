"""What a process that computes asks of torch's libraries, wherever it starts."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onpolicy import contract
from onpolicy.compat.process import (
    HAS_GLIBC,
    KERNEL_CACHES,
    prepare_process,
    use_variables_of,
)
from onpolicy.contract import NO_SPLIT_K, PORTABLE_KERNELS
from onpolicy.errors import ConfigError, ContractError
from onpolicy.ops.checks.fixed_numbers import require_equal

pytestmark = pytest.mark.long

PRODUCT = """
from onpolicy.compat.process import prepare_process
prepare_process()
import torch
with torch.backends.mkl.verbose(1):
    torch.ones(64, 64) @ torch.ones(64, 64)
"""
VARIABLES = ("MKL_CBWR", "OMP_WAIT_POLICY", "NCCL_CUMEM_ENABLE", "USE_HUB_KERNELS")
SHOW = f"import os; print([os.environ.get(name) for name in {VARIABLES}])"
STARTS = {
    "the command line": """
import contextlib
from onpolicy.cli.main import main
with contextlib.suppress(SystemExit):
    main(["report", "--help"])
""",
    "a server": """
from sglang_patches import server_process as serve
serve.serve = lambda argv: None
serve.main([])
""",
}


def run(code, **variables):
    """What the code prints where nobody asked for anything but `variables`."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch was built without MKL")
@pytest.mark.parametrize("asked", ["", "COMPATIBLE"])
def test_strict_sums_are_in_force_from_the_first_product_on(asked):
    said = run(PRODUCT, **({"MKL_CBWR": asked} if asked else {}))
    assert f"CNR:{asked or 'AUTO,STRICT'} " in said, said


@pytest.mark.parametrize("start", STARTS)
def test_a_process_is_prepared_where_it_starts(start):
    code = STARTS[start] + SHOW
    assert run(code).splitlines()[-1] == "['AUTO,STRICT', 'PASSIVE', '0', 'NO']"
    given = dict(zip(VARIABLES, ("AVX2", "ACTIVE", "1", "YES"), strict=True))
    assert run(code, **given).splitlines()[-1] == "['AVX2', 'ACTIVE', '1', 'YES']"


COMPILES = """
import os, sys
from onpolicy.compat.process import prepare_process
prepare_process()
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir(), oct(os.stat(cache_dir()).st_mode & 0o777), os.listdir(os.environ["TMPDIR"]))
"""


def test_compiled_code_lies_at_home_for_its_user_alone_and_not_in_a_place_that_others_foresee(
    tmp_path,
):
    home, temporary = tmp_path / "home", tmp_path / "t"
    temporary.mkdir()
    kept = str(home / ".cache/onpolicy/torchinductor")
    asked = {"HOME": str(home), "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": ""}
    code = "import os; os.environ.pop('TORCHINDUCTOR_CACHE_DIR')\n" + COMPILES
    assert run(code, **asked) == f"{kept} 0o700 []\n"
    ours = "from onpolicy.compat.process import prepare_process\nprepare_process()\n"
    show = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    assert run(ours + show, **{**asked, "TORCHINDUCTOR_CACHE_DIR": "mine"}) == "mine\n"


def test_an_import_prepares_nothing():
    assert run(f"import onpolicy, onpolicy.compat.process\n{SHOW}") == "[None, None, None, None]\n"


COMMAND = """
import os, sys
from onpolicy.cli.main import main

class Torch:
    def find_spec(name, *where):
        if name == "torch":
            print({name: os.environ.get(name) for name in sys.argv[2:]}, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch)
main(["verify", "--hf-checkpoint", "nowhere", "--operators", sys.argv[1]])
"""
"""It ends where torch would be imported."""


@pytest.mark.parametrize("operators", contract.VARIABLES)
def test_a_command_sets_the_variables_of_its_operators_before_torch_is_there(operators):
    asked = contract.VARIABLES[operators]
    answer = subprocess.run(
        [sys.executable, "-c", COMMAND, operators, *asked],
        env={k: v for k, v in os.environ.items() if k not in asked},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert answer.stdout.splitlines()[-1] == str(asked)


@pytest.mark.parametrize(
    ("operators", "name", "value"),
    [
        ("portable", "MKL_CBWR", "AVX2"), ("portable", "ATEN_CPU_CAPABILITY", "avx512"),
        ("portable", "ONEDNN_MAX_CPU_ISA", "ALL"),
        # What many launchers export for deterministic products.
        ("cublaslt", "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("cublaslt", "CUBLASLT_WORKSPACE_SIZE", "32768"),
    ],
)  # fmt: skip
def test_operators_refuse_another_value_of_their_variables(monkeypatch, operators, name, value):
    for other, wanted in contract.VARIABLES[operators].items():
        monkeypatch.setenv(other, wanted)
    use_variables_of(operators)
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=rf"{name}={value}: .*{operators}.*{name}=\S+\. .*leave --operators out"
    ):
        use_variables_of(operators)


def test_variables_that_would_come_after_the_first_use_of_a_gpu_are_refused(monkeypatch):
    """cuBLAS keeps the memory that it had at its first product, whatever the environment says later."""
    for name in NO_SPLIT_K:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG is not set: .*reads once.*Export"
    ):
        use_variables_of("cublaslt")
    for name, value in NO_SPLIT_K.items():
        monkeypatch.setenv(name, value)
    use_variables_of("cublaslt")


def test_portable_operators_take_the_place_of_the_strict_mode_that_nobody_asked_for(monkeypatch):
    for name in PORTABLE_KERNELS:
        monkeypatch.delenv(name, raising=False)
    prepare_process()
    use_variables_of("portable")
    assert {name: os.environ[name] for name in PORTABLE_KERNELS} == PORTABLE_KERNELS


LARGE_BLOCKS = """
import resource
import threading
from onpolicy.compat.process import prepare_process
prepare_process()
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
first = faults()
thread = threading.Thread(target=lambda: [faults() for _ in range(10)])
thread.start(), thread.join()
print(first, sum(faults() for _ in range(10)))
"""


@pytest.mark.skipif(not HAS_GLIBC, reason="no glibc")
def test_large_blocks_are_kept_and_used_again():
    first, later = map(int, run(LARGE_BLOCKS).split())
    assert first > 100 and later < 2 * first, (first, later)  # of ten blocks


HOLES = """
import psutil
from onpolicy.compat.process import give_back_buffers, prepare_process
prepare_process()
import torch

blocks = [torch.ones(1 << 18) for _ in range({mib})]  # of 1 MiB
del blocks[::2]
before = psutil.Process().memory_info().rss
give_back_buffers()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not HAS_GLIBC, reason="no glibc")
def test_what_lies_unused_between_buffers_can_be_given_back():
    assert int(run(HOLES.format(mib=768))) > 320 << 20  # of 384 MiB


@pytest.mark.skipif(not HAS_GLIBC, reason="no glibc")
def test_little_that_lies_unused_is_kept_for_the_next_step():
    assert abs(int(run(HOLES.format(mib=128)))) < 8 << 20  # of 64 MiB


@pytest.mark.parametrize("asked", [None, "0", "1"])
def test_nccl_has_the_same_setting_in_the_trainer_and_in_sglang(monkeypatch, asked):
    """SGLang's own statement, run where a server inherits what a prepared process has."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if asked is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", asked)
    prepare_process()
    trainer = os.environ["NCCL_CUMEM_ENABLE"]
    package = Path(find_spec("sglang").submodule_search_locations[0])
    function = next(
        node
        for node in ast.parse((package / "srt/entrypoints/engine.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "_set_envs_and_config"
    )
    statements = [
        node
        for node in function.body
        if isinstance(node, ast.If) and "'NCCL_CUMEM_ENABLE' not in" in ast.unparse(node.test)
    ]
    assert len(statements) == 1
    settings = SimpleNamespace(enable_symm_mem=False)
    known = {"os": os, "cfg": settings, "server_args": settings}
    known["kv_shard_symmetric_scratch"] = False  # of a flag that came with 0.5.22 and is not given
    exec(compile(ast.Module(statements, []), "engine.py", "exec"), known)
    assert os.environ["NCCL_CUMEM_ENABLE"] == trainer == (asked or "0")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    exec(compile(ast.Module(statements, []), "engine.py", "exec"), known)
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"  # what ours has to be where nobody asks


@pytest.mark.parametrize("given", [{}, {"SGLANG_DG_CACHE_DIR": "/a"}, {"DG_JIT_CACHE_DIR": "/b"}])
def test_both_engines_keep_compiled_kernels_in_one_place(monkeypatch, given):
    for name in KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    prepare_process()
    places = {os.environ[name] for name in KERNEL_CACHES}
    assert len(places) == 1 and places >= set(given.values())


def test_these_tests_are_prepared():
    assert all(os.environ.get(name) for name in VARIABLES)


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        (None, r"MKL_CBWR is not set: let the process begin with .*prepare_process\(\)"),
        ("COMPATIBLE", r"MKL_CBWR=COMPATIBLE: unset it"),
        ("AUTO,STRICT", "other --operators, or run without --true-on-policy-mode here"),
    ],
)
def test_a_self_check_that_fails_says_what_to_do_about_the_mode(monkeypatch, asked, remedy):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if asked is not None:
        monkeypatch.setenv("MKL_CBWR", asked)
    with pytest.raises(ContractError, match=remedy):
        require_equal("linear", (3, 4), "1 rows", torch.zeros(1), torch.ones(1))


def test_transformers_models_can_be_imported_without_onpolicy(tmp_path):
    """As a user's own script does: no path and no variable of ours."""
    code = (
        "import sys; from transformers import AutoModelForCausalLM, Qwen3ForCausalLM\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'onpolicy'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


IN_A_CYCLE = """
from onpolicy.compat.process import collect_rarely

class InACycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("found")

InACycle()
"""


@pytest.mark.parametrize(("call", "said"), [("", "found\n"), ("collect_rarely()", "")])
def test_no_garbage_is_looked_for_at_the_end(call, said):
    command = [sys.executable, "-c", IN_A_CYCLE + call]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == said
