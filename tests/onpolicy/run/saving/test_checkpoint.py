"""Whether a checkpoint is whole, to the last bit."""

import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onpolicy.errors import CheckpointError
from onpolicy.run.saving import checkpoint
from onpolicy.run.saving.checkpoint import STATE, checkpoints, read
from tests.support.changed_json import changes

FILES = [
    STATE, "numbers.json", "sharded/.metadata", "sharded/__0_0.distcp", "hf/config.json",
    "hf/generation_config.json", "hf/model-00000.safetensors", "hf/model.safetensors.index.json",
    "hf/tokenizer.json", "hf/tokenizer_config.json",
]  # fmt: skip


@pytest.fixture
def step(saved, tmp_path):
    return shutil.copytree(saved / "step_000004", tmp_path / "step_000004")


def test_these_are_the_files_of_a_checkpoint(step):
    found = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    assert found == set(FILES)
    assert read(step).state.rollouts_done == 4


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_any_file_is_found_and_the_file_is_named(step, file, place):
    content = bytearray((step / file).read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    (step / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^{file}: (not|no) "):
        read(step)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(step, file):
    (step / file).unlink()
    with pytest.raises(CheckpointError, match=rf"^{file}: missing$"):
        read(step)


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_short_is_named(step, file):
    os.truncate(step / file, 5)
    with pytest.raises(CheckpointError, match=rf"^{file}: (5 bytes, \d+ were written|not JSON)"):
        read(step)


@pytest.mark.parametrize("file", ["hf/model-00001.safetensors", "notes.txt", "new/x"])
def test_a_file_that_was_not_saved_is_named(step, file):
    (step / file).parent.mkdir(exist_ok=True)
    (step / file).write_text("x")
    with pytest.raises(CheckpointError, match=rf"^{file}: not of the checkpoint$"):
        read(step)


def test_all_that_is_wrong_is_said_at_once(step):
    (step / "numbers.json").unlink()
    (step / "extra").write_text("")
    with pytest.raises(CheckpointError, match=r"^numbers.json: missing; extra: not of the"):
        read(step)


def test_a_file_that_cannot_be_read_is_named(step):
    (step / "numbers.json").unlink()
    (step / "numbers.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*numbers.json"):
        read(step)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"), (b"\xff\xfe\x00", "not JSON"), (b"[" * 100_000, "not JSON"),
        (b"[]", "no object"), (b"{}", "holds no digests.*earlier version"),
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_said_in_words(step, content, message):
    (step / STATE).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^state.json: {message}"):
        read(step)


def sealed(record):
    """With the digest that a run would have written."""
    return json.dumps({**record, "digest": checkpoint._digest(record)})


def test_a_record_of_another_version_is_refused(step):
    record = json.loads((step / STATE).read_text())
    del record["digest"], record["learning_rate"]
    (step / STATE).write_text(sealed(record))
    with pytest.raises(CheckpointError, match=r"^state.json: holds no learning_rate; another ver"):
        read(step)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_sealed_record_of_another_shape_is_refused_by_name(step, data):
    text = (step / STATE).read_text()
    record = json.loads(text)
    del record["digest"]
    free = ("governor", "learning_rate", "evaluations", "config", "made_with")
    none = {name for name in record if record[name] is None}
    changed = changes(record, free).filter(lambda r: none == {n for n in r if r[n] is None})
    changed = data.draw(changed)
    try:
        (step / STATE).write_text(sealed(changed))
        with pytest.raises(
            CheckpointError, match=r"^(state.json: |model|hf|.*: not of the|cannot)"
        ):
            read(step)
    finally:
        (step / STATE).write_text(text)


def test_a_record_that_was_changed_is_refused_whatever_it_says_of_the_files(step):
    record = json.loads((step / STATE).read_text())
    (step / STATE).write_text(json.dumps({**record, "run_hash": "another"}))
    with pytest.raises(CheckpointError, match=r"^state.json: not the bytes that were written"):
        read(step)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(step):
    with pytest.raises(CheckpointError, match=r"^state.json: is that of step_000004"):
        read(step.rename(step.with_name("step_000006")))
    assert read(step.with_name("step_000006").rename(step.with_name("best")))


def test_only_what_is_named_as_a_checkpoint_is_one(tmp_path):
    for name in (
        "step_000008", "step_000010", "step_1000000", "step_000008.bak", "step_", "step_x", "Step_1",
        "step_000012.damaged1", ".partial_step_000012", "step_-1", "step_\u0661", "checkpoint",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
    (tmp_path / "step_notes.txt").write_text("")
    assert list(checkpoints(tmp_path)) == [8, 10, 1_000_000]
    assert checkpoints(tmp_path / "nowhere") == {}
