"""The whole vocabulary on a real server: chunked prefills, cached prefixes, turns, forks, filters."""

import dataclasses
import json
import os
import re

import pytest
import torch

from onpolicy.cli.main import main
from onpolicy.config import groups
from onpolicy.errors import ConfigError, ParityError
from onpolicy.ops import draws
from onpolicy.ops.kept_tokens import Cut
from onpolicy.ops.row_digests import row_digests
from onpolicy.rollout.sample_requests import trajectories_of
from onpolicy.rollout.sglang import SglangGroup
from tests.e2e.test_filters import FILTERS, samples_of, with_filters
from tests.e2e.test_turns import Branches, StopsInTheMiddle, drawn, train_samples
from tests.support.after_import import after_import
from tests.support.broken_engine import IN_SERVERS
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.train_runs import ROOT

pytestmark = pytest.mark.engine

ONE_BIT = """
import torch
from sglang_patches import engine_sampler
digests = engine_sampler.row_digests
def of_one_bit_more(rows):
    rows = rows.clone()
    least = rows.argmin(-1, keepdim=True)  # no token of these tests
    return digests(rows.scatter(1, least, torch.nextafter(rows.gather(1, least), torch.tensor(0.0))))
engine_sampler.row_digests = of_one_bit_more
"""


@pytest.fixture(scope="module")
def full(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines")
    with running(make_engines(checkpoint, directory, parity_check="full")) as pair:
        yield pair


def rows(metrics):
    return tuple(metrics[f"parity/num_{name}_rows"] for name in ("compared", "mismatched"))


@pytest.mark.parametrize("rollouter", [StopsInTheMiddle, Branches])
@pytest.mark.parametrize("most", [None, 5], ids=["whole", "interrupted"])
def test_every_row_of_every_turn_is_the_trainers(full, rollouter, most):
    samples = drawn(full, most, rollouter())
    assert sum(sample.num_cached_tokens for sample in samples) > 0
    count = sum(sample.trajectory.num_sampled for sample in samples)
    assert rows(full.trainer.train(train_samples(samples), 0, [0.0]).metrics) == (count, 0)


def test_one_row_in_the_last_turn_is_found(full):
    samples = drawn(full, None)
    trajectory = samples[3].trajectory
    off = [*trajectory.row_digests[:-1], trajectory.row_digests[-1] ^ 1]
    samples[3] = dataclasses.replace(
        samples[3], trajectory=dataclasses.replace(trajectory, row_digests=off)
    )
    place = trajectory.num_sampled - 1
    with pytest.raises(ParityError, match=rf"^1 of .*prompt 3, sample 0.*position={place}: token="):
        full.trainer.train(train_samples(samples), 0, [0.0])


def test_rows_are_of_the_whole_vocabulary_under_filters_beside_requests_without(full, monkeypatch):
    requests = with_filters(make_requests(8, seed=21, max_new_tokens=12), **FILTERS)
    plain = make_requests(4, seed=22, max_new_tokens=12)
    asked = [*requests, *plain]
    trajectories = trajectories_of(asked, full.generate(asked))
    assert [bool(t.kept_tokens) for t in trajectories] == [True] * 8 + [False] * 4
    monkeypatch.setattr(full.trainer.learner, "cut", Cut.of(*FILTERS.values()))
    samples = samples_of(trajectories[:8])
    for sample, request in zip(samples, asked, strict=False):
        sample.seeds = [(request.sampling_seed, 12)]
    assert rows(full.trainer.train(samples, 0, [0.0]).metrics) == (8 * 12, 0)
    monkeypatch.setattr(full.trainer.learner, "cut", None)
    samples = samples_of(trajectories[8:])
    for sample, request in zip(samples, plain, strict=False):
        sample.seeds = [(request.sampling_seed, 12)]
    assert rows(full.trainer.train(samples, 0, [0.0]).metrics) == (4 * 12, 0)


def verify(checkpoint, directory, *flags):
    """(exit code, report) of a short one."""
    file = directory / "report.json"
    code = main([
        "verify", "--hf-checkpoint", str(checkpoint), "--num-prompts", "6", "--max-new-tokens", "12",
        "--temperature", "0.7", "--run-dir", str(directory / "run"), "--json", str(file), *flags,
    ])  # fmt: skip
    return code, json.loads(file.read_text())


def test_verify_compares_all_rows_and_says_how_differences_depend_on_depth(
    checkpoint, tmp_path, capsys
):
    code, report = verify(checkpoint, tmp_path, "--full-vocabulary", "--by-depth")
    assert code == 0
    assert report["num_compared_rows"] == report["num_compared_tokens"] == 2 * 6 * 12
    assert report["num_mismatched_rows"] == 0
    assert sum(bucket["num_tokens"] for bucket in report["by_depth"]) == 2 * 6 * 12
    assert len(report["by_depth"]) > 1
    assert all(x["max_abs_diff"] == x["k3_kl_mean"] == 0 for x in report["by_depth"])
    assert re.search(r"\n +depth +tokens", capsys.readouterr().err)


@pytest.mark.anew
@pytest.mark.runs
def test_an_engine_whose_rows_differ_in_one_bit_fails_with_the_flag(
    checkpoint, tmp_path, monkeypatch, capsys
):
    """In the server's own process, at a token that is not sampled: no log-probability shows it."""
    code = after_import("sglang_patches.engine_sampler", ONE_BIT, IN_SERVERS)
    (tmp_path / "sitecustomize.py").write_text(code)
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    code, report = verify(checkpoint, tmp_path, "--no-step", "--full-vocabulary")
    assert code == 1 and report["num_mismatched_tokens"] == 0
    assert report["num_mismatched_rows"] == report["num_compared_rows"] == 2 * 6 * 12
    assert re.search(
        r"First: prompt \d, sample 0, response position=0: token=\d+, rollout=\w{16}, train=\w{16} ",
        capsys.readouterr().err,
    )


def test_a_trainer_whose_rows_differ_in_one_bit_fails_too(full, monkeypatch):
    def of_one_bit_more(log_probs):
        log_probs = log_probs.clone()
        log_probs[:, 7] = torch.nextafter(log_probs[:, 7], torch.tensor(0.0))
        return row_digests(log_probs)

    samples = train_samples(drawn(full, None))
    monkeypatch.setattr(draws, "row_digests", of_one_bit_more)
    with pytest.raises(ParityError, match="other tokens of the vocabulary have another"):
        full.trainer.train(samples, 0, [0.0])


def test_a_server_that_digests_no_rows_is_refused(engines, full):
    """Each spec as a run that compares rows has it, on servers that someone else has started."""

    def connect(pair):
        config = groups.EngineConfig(rollout_server_url=(pair.rollout.clients[0].url,))
        spec = dataclasses.replace(pair.rollout.servers[0].spec, digests_rows=True)
        SglangGroup(config, [spec], None).connect(pair.trainer.self_check)

    connect(full)
    with pytest.raises(ConfigError, match="Start it with `onpolicy serve --row-digests`"):
        connect(engines)


def test_stock_engines_are_measured_by_depth(checkpoint, tmp_path):
    flags = "--no-true-on-policy-mode", "--no-step", "--by-depth"
    code, report = verify(checkpoint, tmp_path, *flags)
    assert code == 0 and len(report["by_depth"]) > 1
    largest = max(bucket["max_abs_diff"] for bucket in report["by_depth"])
    assert largest == report["max_abs_diff"]
    assert sum(bucket["num_tokens"] for bucket in report["by_depth"]) == 2 * 6 * 12
    assert verify(checkpoint, tmp_path, "--no-true-on-policy-mode", "--full-vocabulary")[0] == 2
