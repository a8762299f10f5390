"""In which mode of MKL each side of a measurement computes."""

import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from onpolicy.bench import loop, rollout
from onpolicy.bench.own_process import USUAL_SUMS, as_users_start_it
from onpolicy.compat.process import STRICT_SUMS
from onpolicy.config import groups
from onpolicy.config.tool_flags import BenchConfig

NAME, STRICT = STRICT_SUMS
MODES = {"aligned": STRICT, "stock": USUAL_SUMS}


@pytest.fixture
def config(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, STRICT)
    model = groups.ModelConfig(hf_checkpoint=str(checkpoint))
    return BenchConfig(what="rollout", model=model, run_dir=str(tmp_path))


def test_the_usual_mode_is_the_one_that_mkl_has_without_the_variable():
    code = "import torch; torch.ones(64, 64) @ torch.ones(64, 64)"
    others = {name: value for name, value in os.environ.items() if name != NAME}
    said = {}
    for asked in ({}, {NAME: USUAL_SUMS}, {NAME: STRICT}):
        environment = {**others, "MKL_VERBOSE": "1", **asked}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        words = [word for word in done.stdout.split() if word.startswith("CNR:")]
        if not words:
            pytest.skip("this PyTorch has no MKL that says its mode")
        said[asked.get(NAME)] = words[0]
    assert said[None] == said[USUAL_SUMS] != said[STRICT]


@pytest.mark.parametrize(("kind", "mode"), MODES.items())
@pytest.mark.parametrize("chosen", [STRICT, "AVX2", None])
def test_a_mode_that_the_user_chose_stays_and_all_is_as_before_afterwards(
    monkeypatch, kind, mode, chosen
):
    monkeypatch.delenv(NAME, raising=False)
    if chosen is not None:
        monkeypatch.setenv(NAME, chosen)
    with as_users_start_it(kind):
        assert os.environ.get(NAME) == (mode if chosen == STRICT else chosen)
    assert os.environ.get(NAME) == chosen


@pytest.mark.parametrize(
    ("kind", "chosen", "seen"),
    [
        ("aligned", ":16:8", ":16:8"), ("stock", ":16:8", None), ("stock", ":4096:8", ":4096:8"),
    ],
)  # fmt: skip
def test_a_stock_side_has_the_memory_of_cublas_that_its_users_have(monkeypatch, kind, chosen, seen):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen)
    with as_users_start_it(kind):
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == seen
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == chosen


def test_servers_of_each_kind_start_in_their_users_mode(config, monkeypatch):
    seen = {}

    def make_group(train_config, hf_config, contract, logs, *_):
        return SimpleNamespace(
            launch=lambda: seen.update({logs.name: os.environ[NAME]}),
            connect=lambda self_check: None,
            stop=lambda: None,
        )

    monkeypatch.setattr(rollout, "make_rollout_group", make_group)
    with rollout.servers(config):
        assert seen == MODES


def test_runs_of_each_kind_start_in_their_users_mode(config, monkeypatch):
    seen = {}

    @contextmanager
    def cluster(*_):
        yield SimpleNamespace(make_engines=None)

    @contextmanager
    def run(config, hf_config, kind, make_engines):
        seen[kind] = os.environ[NAME]
        yield SimpleNamespace(
            step=lambda: 1.0, steps=[{"drawing": 1.0, "train": 1.0, "push": 1.0}] * 2
        )

    monkeypatch.setattr(loop, "on_cluster", cluster)
    monkeypatch.setattr(loop, "started_run", run)
    assert loop.bench_loop(config)["ratio"] == 1.0
    assert seen == MODES
