"""What others wrote is shown by a terminal and never obeyed: in errors, on the console, in logs."""

import json
import logging
import shutil
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.cli.main import main
from onpolicy.errors import in_one_line, visible
from onpolicy.outputs.console import Visible, _Lines
from onpolicy.outputs.samples import _shortened
from tests.support.tiny import make_tokenizer

TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"

SPOKEN = {
    "a title of the window": "\x1b]0;pwned\x07", "a title, by C1": "\x9d0;pwned\x9c",
    "colours, by C1": "\x9b31m", "a device's string, by C1": "\x90q", "a backspace": "ok\b\bno",
    "an overwritten line": "bad\rgood", "text from right to left": "\u202egnp.exe",
    "deleted": "\x7f",
}  # fmt: skip


def obeyed(text):
    """The characters of a text that a terminal would not show."""
    return [c for c in text if c not in "\n\t" and (unicodedata.category(c) == "Cc" or c in TURNS)]


@pytest.mark.parametrize("text", SPOKEN.values(), ids=SPOKEN)
def test_what_a_terminal_would_obey_is_an_escape_wherever_it_is_quoted(text):
    record = logging.LogRecord("onpolicy.x", logging.INFO, "", 1, "said %s", (text,), None)
    shown = {
        "an error of another library": in_one_line(ValueError(text)),
        "a sample": _shortened(text),
        "the console": _Lines().format(record),
        "the log": Visible("%(message)s").format(record),
    }
    assert obeyed(text)
    assert not {where: found for where, said in shown.items() if (found := obeyed(said))}


@given(st.text())
def test_nothing_else_of_a_text_changes(text):
    assert not obeyed(visible(text))
    kept = "".join(c for c in text if not obeyed(c) and c not in "\u2028\u2029")
    if kept == text:
        assert visible(text) == text
    assert visible("\n\tä 漢 👩‍👧 é") == "\n\tä 漢 👩‍👧 é"


def test_a_template_and_the_fields_of_a_file_say_nothing_to_the_terminal(
    checkpoint, tmp_path, capsys
):
    shutil.copytree(checkpoint, tmp_path / "model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('\x1b]0;pwned\x07\x9b31m') }}"
    tokenizer.save_pretrained(tmp_path / "model")
    rows = tmp_path / "one.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "x"}], "\x1b[2J": 1}) + "\n")
    templated = ["--apply-chat-template", "--hf-checkpoint", str(tmp_path / "model")]
    for more in ([], templated):
        main(["data", str(rows), *more])
        said = capsys.readouterr()
        assert not obeyed(said.out + said.err), said
    assert "\\x1b]0;pwned" in said.out + said.err
