"""What the plug-in reaches for inside SGLang, looked up in the source of any version of it.

A hook that moved, or whose function takes other arguments, is what a new SGLang breaks first. Reading
the source says so in seconds, before an environment is built, for the hooks of GPUs too.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sglang_patches

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BRANCHES = (ast.If, ast.Try, ast.With, ast.ExceptHandler)


@dataclass(frozen=True)
class Found:
    """A name of SGLang's: the file that has it, and the arguments that it takes, if it is a function."""

    file: Path
    arguments: str | None


def targets() -> dict[str, str]:
    """Every dotted name of SGLang's that `sglang_patches` hooks or imports: name -> module of ours."""
    named: dict[str, str] = {}
    for info in pkgutil.iter_modules(sglang_patches.__path__):
        module = importlib.import_module(f"sglang_patches.{info.name}")
        constants = [value for key, value in vars(module).items() if key.isupper()]
        hooked = [name for name in constants if str(name).startswith("sglang.")]
        for name in [*hooked, *_imports(Path(str(module.__file__)))]:
            named.setdefault(name, info.name)
    return named


def _imports(file: Path) -> list[str]:
    """What a module imports from SGLang, less what it can do without (try: ... except ImportError)."""
    tree = ast.parse(file.read_text())
    optional = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any("ImportError" in ast.dump(h) for h in node.handlers)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node not in optional
        if (node.module or "").partition(".")[0] == "sglang"
        for alias in node.names
    ]


def find(root: Path, target: str) -> Found | None:
    """Look `target` up below `root`, the directory that holds the package `sglang`; None: not there."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:end])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            return _find_in(root, file, parts[end:])
    return None


def _find_in(root: Path, file: Path, names: list[str]) -> Found | None:
    node: ast.AST = _parsed(file)
    for depth, name in enumerate(names):
        inside = _named(node, name)
        if inside is None:
            return _among_stars(root, file, names) if depth == 0 else None
        if isinstance(inside, ast.ImportFrom):
            original = next(a.name for a in inside.names if name in (a.asname, a.name))
            module = _absolute(root, file, inside)
            if module.partition(".")[0] != "sglang":
                return Found(file, None)
            return find(root, ".".join([module, original, *names[depth + 1 :]]))
        node = inside
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return Found(file, ast.unparse(node.args) if is_function else None)


def _among_stars(root: Path, file: Path, names: list[str]) -> Found | None:
    """Look in the modules of which `file` imports everything."""
    stars = [
        _absolute(root, file, node)
        for node in ast.walk(_parsed(file))
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    ]
    return next(filter(None, (find(root, ".".join([star, *names])) for star in stars)), None)


def _absolute(root: Path, file: Path, node: ast.ImportFrom) -> str:
    """The module that an import statement of `file` names."""
    package = file.relative_to(root).with_suffix("").parts[: -node.level] if node.level else ()
    return ".".join(filter(None, [*package, node.module]))


def _named(scope: ast.AST, name: str) -> ast.AST | None:
    """What binds `name` in a module or class, in any of its branches."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _DEFINITIONS):
            if node.name == name:
                return node
        elif isinstance(node, ast.ImportFrom):
            if any(name in (alias.asname, alias.name) for alias in node.names):
                return node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            written = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in written):
                return node
        elif isinstance(node, _BRANCHES) and (found := _named(node, name)) is not None:
            return found
    return None


def differences(root: Path, pinned: Path) -> tuple[list[str], list[str]]:
    """What is gone from the SGLang below `root`, and what takes other arguments than below `pinned`."""
    missing, changed = [], []
    for target, module in targets().items():
        now, before = find(root, target), find(pinned, target)
        if now is None:
            missing.append(f"{target} (sglang_patches/{module}.py): {_elsewhere(root, target)}")
        elif before is not None and now.arguments != before.arguments:
            changed.append(
                f"{target} (sglang_patches/{module}.py): takes ({now.arguments}), where the pinned "
                f"version takes ({before.arguments})"
            )
    return missing, changed


def _elsewhere(root: Path, target: str) -> str:
    name = target.rpartition(".")[2]
    defines = re.compile(rf"^\s*(class |def |async def ){name}\b|^{name}\s*[:=]", re.MULTILINE)
    files = [
        str(file.relative_to(root))
        for file in sorted(root.joinpath("sglang", "srt").rglob("*.py"))
        if defines.search(file.read_text(errors="replace"))
    ]
    return (
        f"not there. The name stands in {', '.join(files[:4])}" if files else "not there any more"
    )


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(errors="replace"))
