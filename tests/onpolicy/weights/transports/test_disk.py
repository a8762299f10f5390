"""The files of a push: in a directory of its own, and gone after it; tests/e2e pushes to engines."""

import resource

import pytest
import torch
from safetensors.torch import load_file

from onpolicy.errors import WeightSyncError
from onpolicy.weights.transports.disk import DiskTransport, remove_leftovers

BUCKET = [("a", torch.arange(6.0).reshape(2, 3).T), ("b", torch.ones(1000, dtype=torch.bfloat16))]


@pytest.fixture
def run_dir(tmp_path):
    """With directories of the user's in it."""
    for name in ("weights", ".weights_mine", f".weights_{'g' * 32}"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "model-00000.safetensors").write_text("mine")
    yield tmp_path / "run"
    for name in ("weights", ".weights_mine", f".weights_{'g' * 32}"):
        assert (tmp_path / "run" / name / "model-00000.safetensors").read_text() == "mine"


def test_a_push_leaves_nothing_and_touches_nothing_else(run_dir):
    transport, before = DiskTransport(run_dir), sorted(run_dir.iterdir())
    for _ in range(2):
        transport.open([])
        (directory,) = set(run_dir.iterdir()) - set(before)
        transport.send(BUCKET, [], "1")
        transport.send(BUCKET[:1], [], "1")
        assert torch.equal(load_file(directory / "model-00000.safetensors")["b"], BUCKET[1][1])
        assert torch.equal(load_file(directory / "model-00001.safetensors")["a"], BUCKET[0][1])
        transport.close([], "1")
        assert sorted(run_dir.iterdir()) == before


def test_a_push_after_one_that_failed_starts_anew(run_dir):
    transport, before = DiskTransport(run_dir), sorted(run_dir.iterdir())
    transport.open([])
    transport.send(BUCKET, [], "1")
    transport.abandon()
    transport.open([])
    (directory,) = set(run_dir.iterdir()) - set(before)
    assert list(directory.iterdir()) == []
    transport.close([], "1")


def test_what_a_kill_left_is_swept(run_dir):
    before = sorted(run_dir.iterdir())
    DiskTransport(run_dir).open([])
    DiskTransport(run_dir).open([])
    remove_leftovers(run_dir)
    assert sorted(run_dir.iterdir()) == before


def test_a_full_disk_is_an_error_that_says_where_and_how_to_go_on(run_dir):
    transport, before = DiskTransport(run_dir), sorted(run_dir.iterdir())
    transport.open([])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            WeightSyncError, match=r"cannot be written \(.+\)\. No checkpoint is lost"
        ):
            transport.send(BUCKET, [], "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    transport.abandon()
    assert sorted(run_dir.iterdir()) == before


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(
        WeightSyncError, match=r"cannot be written \(Not a directory\)\. No checkpoint"
    ):
        DiskTransport(tmp_path / "run").open([])
