"""GPU suite: all promises of the aligned operators that only a GPU can break.

`make gpu-test` runs it. Without a GPU every test is skipped by name; `--rehearse` runs the same code
on a CPU with small sizes, which proves that the tests work and nothing about a GPU.
"""

import sys
from pathlib import Path

import pytest
import torch

from onpolicy.compat.process import prepare_process
from onpolicy.ops.stock import StockOperators
from tests.gpu.backends import make_for, obstacle
from tests.gpu.row_checks import Numbers
from tests.gpu.run import FILES
from tests.gpu.setting import GPU, REHEARSAL
from tests.gpu.summary import Summary
from tests.gpu.tally import Tally
from tests.support.gpu.launches import watch_launches
from tests.support.gpu.machine import describe_machine
from tests.support.gpu.operators import BACKENDS, make_linears_of_bytes, missing_part
from tests.support.violations import few_rows_differ


def pytest_addoption(parser):
    group = parser.getgroup("gpu", "the GPU suite (tests/gpu)")
    group.addoption("--gpu-json", metavar="FILE", help="write what was compared into FILE")
    group.addoption(
        "--gpu-models", metavar="NAMES", help="sweep these models alone; commas between"
    )
    group.addoption("--rehearse", action="store_true", help="run the code on a CPU, small")


def _option(config, name):
    return config.getoption(name, default=None)  # unknown when this directory is not an argument


def _setting(config):
    return REHEARSAL if _option(config, "rehearse") else GPU


def pytest_configure(config):
    prepare_process()
    watch_launches()
    file = _option(config, "gpu_json")
    if file and (torch.cuda.is_available() or _option(config, "rehearse")):
        config.pluginmanager.register(Summary(Path(file)))


def _backends(module):
    """Return the backends of a file's tests. `cublaslt` is `hopper` but for its products; it is skipped
    unless its variables are exported."""
    return (*BACKENDS, "cublaslt") if module.endswith("test_gemm") else BACKENDS


def pytest_generate_tests(metafunc):
    rehearsed = _option(metafunc.config, "rehearse")
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize(
            "backend", ["cpu"] if rehearsed else _backends(metafunc.module.__name__)
        )
    if "model" in metafunc.fixturenames:
        models = _setting(metafunc.config).models
        if names := _option(metafunc.config, "gpu_models"):
            models = [model for model in models if model.name in names.split(",")]
        metafunc.parametrize("model", models, ids=lambda model: model.name)
    if "dim" in metafunc.fixturenames:
        metafunc.parametrize("dim", _setting(metafunc.config).head_dims)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason := _obstacle(config):
            item.add_marker(pytest.mark.skip(reason=reason))
    here = set(ours)
    places = [place for place, item in enumerate(items) if item in here]
    ours.sort(key=lambda item: FILES.index(item.path.stem))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


def _obstacle(config):
    if _option(config, "rehearse"):
        return None
    if not torch.cuda.is_available():
        return "needs a GPU: torch.cuda.is_available() is False"
    if "tests.support.triton_interpreter" in sys.modules:
        return "tests/conftest.py put Triton's interpreter in place of its compiler: make gpu-test"
    return None


def pytest_terminal_summary(terminalreporter):
    if torch.cuda.is_available():
        terminalreporter.write_line(", ".join(f"{k} {v}" for k, v in describe_machine().items()))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Fail a test if one of its comparisons differs, and a negative control if none does."""
    result = yield
    if tally := pyfuncitem.funcargs.get("tally"):
        is_control = pyfuncitem.path.stem == "test_negative_controls"
        tally.require_some() if is_control else tally.require_none()
    return result


@pytest.fixture(scope="session")
def setting(request):
    return _setting(request.config)


@pytest.fixture
def numbers(setting):
    return Numbers(torch.bfloat16, setting.device)


@pytest.fixture
def tally(record_property):
    counts = Tally()
    record_property("tally", counts)
    return counts


@pytest.fixture
def operators(backend, setting, request):
    """Return a backend's aligned operators; skip the test with the name of a missing requirement."""
    file = request.path.stem
    if setting.device == "cuda" and (problem := obstacle(backend, file)):
        pytest.skip(f"{backend} operators: {problem}")
    return make_for(backend, file, setting)


@pytest.fixture
def of_bytes(setting, monkeypatch):
    """Return operators whose linears multiply bytes; in a rehearsal by a stand-in for DeepGEMM."""
    if setting.device != "cuda":
        from tests.support.bytes_on_cpu import OfRounded, stand_in  # which defines what a GPU has

        stand_in(monkeypatch)
        return OfRounded(1)
    if problem := missing_part("deep_gemm"):
        pytest.skip(f"deep_gemm: {problem}")
    return make_linears_of_bytes()


@pytest.fixture
def stock(setting):
    """Return kernels that depend on the batch: a GPU's own, and built ones in a rehearsal.

    A CPU's own may well be row-invariant (Intel's are, when MKL is asked for it).
    """
    return StockOperators() if setting.device == "cuda" else few_rows_differ()
