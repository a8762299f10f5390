"""Which packages may know which: the picture in docs/architecture.md, enforced."""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.each_file import of_each

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]

GROUND = {
    "errors", "images", "trajectory", "types", "token_weights", "contract", "system", "config",
}  # fmt: skip
MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    "config": GROUND | {"algorithm"},
    "algorithm": set(),
    "images": {"errors", "system"},
    "chat": {"errors", "images", "system"},
    "cluster": GROUND | {"compat", "outputs", "rollout", "training", "weights"},
    "agents": GROUND | {"chat", "rollout"},
    "compat": {"contract", "errors", "system"},
    "ops": {"compat", "contract", "errors", "weights"},
    "weights": GROUND,
    "models": GROUND | {"ops", "weights"},
    "parity": GROUND,
    "outputs": GROUND,
    "report": GROUND | {"outputs"},
    "rollout": GROUND | {"chat", "models"},
    "rewards": GROUND | {"chat", "models"},
    "training": GROUND | {"algorithm", "compat", "ops", "models", "parity", "weights"},
}
"""Rooms of onpolicy below the ones that compose; those may import anything."""

COMPOSING = {"run", "explain", "bench", "cli", "api"}

TAPS = {"contract", "errors", "models", "ops"}
"""What `onpolicy/explain/taps` may import, which engines run."""

OF_EXPLAIN = [
    *(ROOT / "onpolicy/explain").rglob("*.py"),
    ROOT / "onpolicy/cli/explain.py",
    ROOT / "sglang_patches/taps.py",
]
"""Files of a plug-in, which nothing else imports or names."""

WORDS_OF_EXPLAIN = re.compile(r"\b(?:taps?|tapped|recorder|evidence|explain\w*|microscope)\b", re.I)
WHERE_COMMANDS_ARE_NAMED = {"cli", "config"}


@functools.cache
def imported(file):
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@functools.cache
def ours(file, package):
    """Names of the parts of `package` that a file imports."""
    parts = {name.split(".")[1] for name in imported(file) if name.startswith(package + ".")}
    return {
        p for p in parts if (ROOT / package / p).is_dir() or (ROOT / package / f"{p}.py").is_file()
    }


def files(package):
    return sorted((ROOT / package).rglob("*.py"))


def part_of(file):
    """The room of a file of onpolicy; of another package, the package."""
    package, part, *_ = file.relative_to(ROOT).parts
    return part.removesuffix(".py") if package == "onpolicy" else package


@of_each(files("onpolicy"))
def test_directions_inside_onpolicy(file):
    part = part_of(file)
    if part not in COMPOSING | {"__init__"}:
        assert ours(file, "onpolicy") - {part} <= MAY_IMPORT[part]


def test_the_trainer_and_the_rollout_never_know_each_other():
    for part, other in [("rollout", "training"), ("training", "rollout"), ("weights", "training")]:
        assert other not in MAY_IMPORT[part]


@of_each(files("onpolicy/explain/taps"))
def test_what_records_an_engine_knows_operators_and_models(file):
    assert ours(file, "onpolicy") - {"explain"} <= TAPS
    assert only_taps(file)


def only_taps(file):
    """Whether what a file imports of explain is the part that runs in engines."""
    names = [name for name in imported(file) if name.startswith("onpolicy.explain")]
    return all(name.startswith("onpolicy.explain.taps") for name in names)


@of_each(files("sglang_patches"))
def test_the_plugin_knows_only_operators_contract_chats_models_and_weights(file):
    known = {"chat", "compat", "ops", "contract", "errors", "images", "models", "system", "weights"}
    assert ours(file, "onpolicy") - ({"explain"} if file in OF_EXPLAIN else set()) <= known
    assert only_taps(file)


CORE = [file for name in ("onpolicy", "sglang_patches") for file in files(name)]


@of_each([f for f in CORE if f not in OF_EXPLAIN])
def test_explain_is_a_plug_in_that_the_core_neither_imports_nor_names(file):
    """Nothing is known of it by a command in a remedy, and by its name where commands are listed."""
    assert not any(name.startswith("onpolicy.explain") for name in imported(file))
    if part_of(file) not in WHERE_COMMANDS_ARE_NAMED:
        assert not WORDS_OF_EXPLAIN.findall(file.read_text().replace("onpolicy explain", ""))


def test_grammars_are_known_where_tokens_are_sampled_and_scored_alone():
    modules = {"onpolicy.models.token_grammars", "sglang_patches.engine_grammars"}
    assert {str(f.relative_to(ROOT)) for f in CORE if modules & {*imported(f)}} == {
        "onpolicy/rollout/turns.py",
        "onpolicy/training/batch.py",
        "sglang_patches/engine_grammars.py",
        "sglang_patches/engine_sampler.py",
        "sglang_patches/plugin.py",
    }


def test_the_words_of_explain_are_found():
    text = "from x import Recorder  # what the taps say"
    assert WORDS_OF_EXPLAIN.findall(text) == ["Recorder", "taps"]


def test_a_module_is_read_in_one_sitting():
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for package in ("onpolicy", "sglang_patches", "fallback_correction")
        for file in files(package)
    }
    assert {name: length for name, length in lengths.items() if length > 500} == {}


@of_each(files("onpolicy"))
def test_onpolicy_reaches_the_plugin_only_by_starting_it(file):
    assert not ours(file, "sglang_patches")


@of_each(files("onpolicy"))
def test_only_its_command_reaches_what_measures(file):
    assert not ours(file, "benchmarks")
    if part_of(file) != "bench" and file != ROOT / "onpolicy/cli/bench.py":
        assert "bench" not in ours(file, "onpolicy")


@of_each(files("fallback_correction"))
def test_fallback_correction_stands_alone_on_torch(file):
    standard = {*sys.stdlib_module_names, "torch", "fallback_correction"}
    assert {name.split(".")[0] for name in imported(file)} <= standard


@of_each(files("onpolicy"))
def test_only_training_and_what_composes_reach_fallback_correction(file):
    if part_of(file) not in COMPOSING | {"training", "algorithm"}:
        records = {"config", "ranges"} if part_of(file) == "config" else set()
        assert ours(file, "fallback_correction") <= records


@of_each(files("onpolicy"))
def test_nothing_of_ours_goes_through_an_adapter_of_another_stack(file):
    assert "adapters" not in ours(file, "fallback_correction")


@of_each(files("onpolicy/algorithm"))
def test_the_algorithm_stands_on_torch_and_the_ground_of_fallback_correction(file):
    assert ours(file, "fallback_correction") <= {"ranges", "tokens"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("onpolicy.config", {"torch", "transformers", "sglang", "numpy"}),
        ("onpolicy.cluster.engine_host", {"torch", "transformers", "sglang"}),
        ("onpolicy.cluster.trainer_rank", {"torch", "transformers"}),  # before it is prepared
        ("onpolicy.cluster.local_ray", {"torch", "transformers"}),
        ("sglang_patches.server_process", {"torch", "numpy", "sglang"}),  # the guard of a server
        ("onpolicy.run.launch.early_engine", {"torch", "numpy"}),  # before that server begins
        ("fallback_correction.config", {"torch", "numpy", "tyro"}),
        ("onpolicy.algorithm.objectives", {"transformers", "sglang", "tyro"}),
        ("onpolicy.algorithm.estimators", {"transformers", "sglang", "tyro"}),
        ("fallback_correction.adapters.miles", {"transformers", "sglang", "onpolicy", "tyro"}),
    ],
)
def test_what_can_be_imported_alone_brings_nothing_heavy_along(module, absent):
    code = f"import sys, {module}; print(*sorted({absent} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@of_each(files("onpolicy/config"))
def test_the_configuration_imports_nothing_heavy(file):
    heavy = {"torch", "transformers", "sglang", "numpy"}
    assert not heavy & {name.split(".")[0] for name in imported(file)}


@of_each([*files("tests/gpu"), *files("tests/support")])
def test_what_a_check_on_a_gpu_needs_is_not_a_benchmark(file):
    assert not any(name.split(".")[0] == "benchmarks" for name in imported(file))


def module_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def test_no_module_imports_itself_on_a_way_round():
    """Imports inside functions and those for types alone count too; packages do not."""
    packages = ("onpolicy", "sglang_patches", "fallback_correction")
    modules = {module_of(file): file for package in packages for file in files(package)}
    graph = {name: {*imported(file)} & modules.keys() - {name} for name, file in modules.items()}
    assert sum(map(len, graph.values())) > len(modules)
    assert [*TopologicalSorter(graph).static_order()]  # raises CycleError, which names the modules


STATE = """
import importlib, logging, os, sys
import megatron.core.dist_checkpointing.strategies.torch as strategies
import math_verify, torch, transformers.modeling_utils

OURS = ("onpolicy", "sglang_patches", "fallback_correction", "benchmarks")

def state():
    return {
        "variables": dict(os.environ),
        "levels": {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict
                   if not name.startswith(OURS)},
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "of Megatron": strategies._get_filesystem_reader.__module__,
        "linear": torch.nn.functional.linear.__module__,
    }

before = state()
for module in sys.argv[1:]:
    importlib.import_module(module)
after = state()
for name, was in before.items():
    now = after[name]
    if isinstance(was, dict):
        now = {key: now.get(key) for key in was}
    assert now == was, (name, was, now)
"""
"""What other libraries, and the process, are asked for before and after the imports."""


def test_importing_changes_nothing():
    """Of other libraries' functions and loggers, of variables and of torch's settings."""
    pytest.importorskip("megatron.core")
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for package in ("onpolicy", "fallback_correction")
        for file in files(package)
        if not {"triton", "hopper", "__main__"} & {*file.with_suffix("").parts}
    ]
    modules = [name.removesuffix(".__init__") for name in modules]
    done = subprocess.run(
        [sys.executable, "-c", STATE, *modules], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
