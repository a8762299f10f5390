"""What a command puts into an engine; recorded engines in earnest are in tests/e2e."""

import json

import pytest

from onpolicy.contract import EXTENSIONS_VARIABLE
from onpolicy.explain.explain_inputs import TAPS
from onpolicy.ops.cpu import CpuOperators
from sglang_patches.extensions import Extension, asked_for


def test_an_engine_has_no_extension_unless_a_command_names_one(monkeypatch):
    monkeypatch.delenv(EXTENSIONS_VARIABLE, raising=False)
    assert asked_for() == []


def test_extensions_are_made_of_what_the_command_says(monkeypatch, tmp_path):
    monkeypatch.setenv(EXTENSIONS_VARIABLE, json.dumps({TAPS: str(tmp_path)}))
    (taps,) = asked_for()
    assert isinstance(taps, Extension) and taps.directory == tmp_path
    operators = CpuOperators(1)
    assert taps.around(operators) is not operators


def test_an_extension_that_is_not_there_ends_the_engine(monkeypatch):
    monkeypatch.setenv(EXTENSIONS_VARIABLE, json.dumps({"sglang_patches.taps:Gone": ""}))
    with pytest.raises(AttributeError, match="Gone"):
        asked_for()
