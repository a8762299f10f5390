"""Files are whole, or as they were."""

import contextlib
import os
import resource

import pytest

from onpolicy.system import files


@contextlib.contextmanager
def no_file_over(size):
    """Limit the size of the files that this process writes, as a full disk would.

    Not for longer than it takes: pytest says in a file, where its output goes to one, what came of it.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    file = tmp_path / "a.json"
    for content in ("first", b"second"):
        files.write(file, content)
    assert file.read_text() == "second"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "a.json"
    files.write(file, "first")
    with no_file_over(100), pytest.raises(OSError) as error:
        files.write(file, "x" * 101)
    assert error.value.filename == str(file)
    assert file.read_text() == "first"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_on_the_way_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "a.json"
    files.write(file, "first")
    with pytest.raises(KeyboardInterrupt), files.replacing(file) as partial:
        partial.write_text("second")
        assert file.read_text() == "first"
        raise KeyboardInterrupt
    assert file.read_text() == "first"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_new_file_has_the_mode_of_a_new_file(tmp_path):
    files.write(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_nothing_takes_the_place_of_a_link_or_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to("target")
    files.write(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "x"
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write(tmp_path / "pipe", "x")
    assert os.read(end, 9) == b"x" and (tmp_path / "pipe").is_fifo()
    os.close(end)


def test_a_line_is_added_as_a_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.jsonl"
    files.append(file, b"first")
    with no_file_over(10), pytest.raises(OSError) as error:
        files.append(file, b"second")
    assert error.value.filename == str(file)
    assert file.read_text() == "first\n"
