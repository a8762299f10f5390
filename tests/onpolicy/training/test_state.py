"""A checkpoint is data: whoever made it, loading it runs no code of theirs."""

import pickle
import shutil
from contextlib import suppress
from pathlib import PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp

from onpolicy.errors import CheckpointError
from tests.support.crafted_checkpoints import ATTACKS, tell_of_another_file
from tests.support.unstarted_run import make_run


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    return make_run(checkpoint, tmp_path_factory.mktemp("run"))[1].trainer


@pytest.fixture(scope="module")
def written(trainer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("written")
    trainer.save(directory)
    return directory


@pytest.fixture
def crafted(written, tmp_path):
    return shutil.copytree(written, tmp_path / "crafted")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_no_code_runs(trainer, crafted, tmp_path, attack):
    attack(crafted / "sharded", tmp_path / "trace")
    with pytest.raises(CheckpointError, match=ATTACKS[attack]):
        trainer.load(crafted)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_code_runs_in_dcps_own_reader(trainer, crafted, tmp_path, attack):
    """So the test above would notice."""
    attack(crafted / "sharded", tmp_path / "trace")
    tensors = {name: tensor.clone() for name, tensor in trainer.policy._tensors().items()}
    with suppress(Exception, dcp.api.CheckpointException):  # what the code returns is no tensor
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(crafted / "sharded"))
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "path",
    [
        "../sharded/__0_0.distcp", "/etc/passwd", "a/b", "..", ".", "",
        PurePosixPath("__0_0.distcp"), 3,
    ],
)  # fmt: skip
def test_tensors_are_read_from_files_beside_the_index_alone(trainer, crafted, path):
    tell_of_another_file(crafted / "sharded", path)
    with pytest.raises(CheckpointError, match="which is no file beside it"):
        trainer.load(crafted)


def test_nothing_stands_between_a_file_and_its_tensors(trainer, crafted):
    """DCP would look up a transformation of the stream by its name."""
    index = crafted / "sharded" / ".metadata"
    metadata = dcp.FileSystemReader(index.parent).read_metadata()
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is stored in an unknown way"):
        trainer.load(crafted)


class Replace:
    """Pickles as a call of something that an index may name, with any arguments."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"not a pickle",
        pickle.dumps([1]),
        pickle.dumps(torch.Size([1])),
        pickle.dumps(Replace(torch.serialization._get_layout, "torch.no_layout")),
        pickle.dumps(Replace(dcp.metadata.Metadata, None)),
        pickle.dumps(Replace(dcp.metadata.Metadata, {}, None, [1])),
        b"ctorch\nSize\n(Vx\ntR.",
    ],
)
def test_what_is_no_index_is_refused_in_words(trainer, crafted, content):
    (crafted / "sharded" / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged or does not fit this model \(its index "):
        trainer.load(crafted)


@pytest.mark.parametrize("name", ["FileSystem", "Path", "_StorageInfo.__init__.__globals__"])
def test_an_index_names_only_what_an_index_needs(trainer, crafted, name):
    """Nor an attribute of that: pickle follows dots."""
    module = b"torch.distributed.checkpoint.filesystem"
    words = [b"\x8c" + bytes([len(word)]) + word for word in (module, name.encode())]
    (crafted / "sharded" / ".metadata").write_bytes(b"\x80\x04" + b"".join(words) + b"\x93.")
    with pytest.raises(CheckpointError, match=rf"names \S+\.{name}, which is no part of an index"):
        trainer.load(crafted)
