"""What the plug-in reaches for inside SGLang, looked up in the source of any version of it.

A hook that moved, or whose function takes other arguments, is what a new SGLang breaks first. Reading
the source says so in seconds, before an environment is built, for the hooks of GPUs too.
"""

import ast
import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path

import sglang_patches

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BRANCHES = (ast.If, ast.Try, ast.With, ast.ExceptHandler)


def targets():
    """Every dotted name of SGLang's that `sglang_patches` hooks or imports: name -> module of ours."""
    named = {}
    for info in pkgutil.iter_modules(sglang_patches.__path__):
        module = importlib.import_module(f"sglang_patches.{info.name}")
        constants = [value for key, value in vars(module).items() if key.isupper()]
        hooked = [name for name in constants if str(name).startswith("sglang.")]
        for name in [*hooked, *_imports(Path(str(module.__file__)))]:
            named.setdefault(name, info.name)
    return named


def _imports(file):
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


def find(root, target):
    """(file, arguments of a function) of a name below `root`, which holds `sglang`; None: not there."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:end])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            return _find_in(root, file, _parsed(file), parts[end:])
    return None


def _find_in(root, file, scope, names):
    """What binds the first name in a scope, and the others in what it is bound to."""
    if not names:
        is_function = isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef))
        return file, ast.unparse(scope.args) if is_function else None
    name, *inner = names
    for node in _statements(scope):
        if isinstance(node, _DEFINITIONS) and node.name == name:
            return _find_in(root, file, node, inner)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            written = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in written):
                return None if inner else (file, None)
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if alias.name == "*" or name in (alias.asname, alias.name):
                original = name if alias.name == "*" else alias.name
                found = _imported(root, file, node, [original, *inner])
                if found is not None:
                    return found
    return None


def _statements(scope):
    """Those of a module or class, in all of its branches."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, _BRANCHES):
            yield from _statements(node)


def _imported(root, file, statement, names):
    """What `file` imports, where it comes from; the file itself if that is not of SGLang."""
    package = file.relative_to(root).with_suffix("").parts[: -statement.level or None]
    parts = filter(None, [*(package if statement.level else ()), statement.module])
    module = ".".join(parts)
    ours = module.partition(".")[0] == "sglang"
    return find(root, ".".join([module, *names])) if ours else (file, None)


def differences(root, pinned):
    """What is gone from the SGLang below `root`, and what takes other arguments than below `pinned`."""
    missing, changed = [], []
    for target, module in targets().items():
        now, before = find(root, target), find(pinned, target)
        if now is None:
            missing.append(f"{target} (sglang_patches/{module}.py): {_elsewhere(root, target)}")
        elif before is not None and now[1] != before[1]:
            changed.append(
                f"{target} (sglang_patches/{module}.py): takes ({now[1]}), where the pinned "
                f"version takes ({before[1]})"
            )
    return missing, changed


def _elsewhere(root, target):
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
def _parsed(file):
    return ast.parse(file.read_text(errors="replace"))
