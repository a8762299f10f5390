"""Without a directory an engine is not recorded; engines in earnest are in tests/e2e."""

import ast
from pathlib import Path

from onpolicy.contract import TAPS_VARIABLE
from sglang_patches import plugin


def test_without_a_directory_the_plugin_has_none_and_imports_none(monkeypatch):
    monkeypatch.delenv(TAPS_VARIABLE, raising=False)
    assert plugin._taps() is None
    tree = ast.parse(Path(plugin.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("taps" in ast.unparse(node) for node in imports)
