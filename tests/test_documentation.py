"""Files, folders and names that the documents, docstrings and comments mention are there."""

import ast
import io
import re
import sysconfig
import tokenize
from pathlib import Path

import yaml

from tests.support.each_file import of_each

ROOT = Path(__file__).parents[1]
PACKAGES = ("onpolicy", "sglang_patches", "fallback_correction", "benchmarks")
FOLDERS = (*PACKAGES, "tests", "docs", "examples", "requirements")

FILE = re.compile(
    r"(?<![\w/.{<$-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|sh|ya?ml|toml|c|css|js|html)\b(?!/)"
)
FOLDER = re.compile(rf"(?<![\w/.<$-])(?:{'|'.join(FOLDERS)})/[\w/.*-]*+(?![<$\[])")
DOTTED = re.compile(rf"(?<![\w/.])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")

ELSEWHERE = ("miles/", "slime/", "verl/")
"""Repositories that docstrings cite as the source of a formula."""

NOT_OURS = {
    "rewards.py", "path/to/file.py", "report.html",  # the user's
    "mis.py", "model_runner.py", "p2p_communication.py",  # of Miles, SGLang and Megatron-core
    "deep_gemm/__init__.py", "deep_gemm/cuda_helpers.py", "sgl_kernel/flash_attn.py",  # on GPUs alone
    "results/gpu_test.md", "benchmarks/results/gpu_test.json",  # written there
    "benchmarks/results/gpu_quarter.jsonl", "gpu_quarter.md",
}  # fmt: skip


def listed(*endings):
    """The project's files, those whose names end so if endings are given."""
    folders = [ROOT / name for name in (*FOLDERS, ".github")]
    files = [*ROOT.iterdir(), *(file for folder in folders for file in folder.rglob("*"))]
    return sorted(f for f in files if f.is_file() and f.name.endswith(endings or ""))


def prose(file):
    """A document's text without its web addresses; docstrings and comments of a module."""
    text = file.read_text()
    if file.suffix == ".md":
        return re.sub(r"(?:https?://|joschu\.net)\S+", "", text)
    statements = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    constants = [value.value for value in statements if isinstance(value, ast.Constant)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join([*(text for text in constants if isinstance(text, str)), *comments])


def upstream():
    """Where the sources of the packages are that docstrings cite."""
    libraries = Path(sysconfig.get_path("purelib"))
    return Path(sysconfig.get_path("stdlib")), libraries, libraries / "megatron" / "core"


def missing_files(text, document, names):
    """Paths that `text` mentions and nothing has: of the root, of onpolicy/, or beside `document`.

    NAME in a path stands for any.
    """
    roots = (ROOT / "onpolicy", *upstream(), *document.parents)
    folders = {path.rstrip("./") for path in FOLDER.findall(text)}
    for path in sorted(set(FILE.findall(text)) | folders):
        if path in NOT_OURS or path.startswith(ELSEWHERE) or path in names:
            continue
        if not any(next(root.glob(path.replace("NAME", "*")), None) for root in roots):
            yield path


def missing_names(text):
    """Dotted names of ours that `text` mentions, whose module is missing or does not have them."""
    for name in sorted(set(DOTTED.findall(text))):
        parts, place = name.split("."), ROOT
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        if parts and (place / f"{parts[0]}.py").is_file():
            place /= f"{parts.pop(0)}.py"
        module = place / "__init__.py" if place.is_dir() else place
        if parts and not (module.is_file() and re.search(rf"\b{parts[0]}\b", module.read_text())):
            yield name


DOCUMENTS = listed(".md", ".py")
NAMES = {file.name for file in listed()}


@of_each(DOCUMENTS)
def test_what_is_mentioned_is_there(file):
    text = prose(file)
    # Violations in tests mention names that they must not have.
    names = [] if file.is_relative_to(ROOT / "tests") else [*missing_names(text)]
    missing = [*missing_files(text, file, NAMES), *names]
    assert not missing, missing


@of_each(listed(".md"))
def test_links_lead_somewhere(file):
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path = target.partition("#")[0]
        if path and "://" not in target:
            assert (file.parent / path).exists(), target


def test_a_path_or_a_name_that_is_not_there_is_found():
    here = ROOT / "docs" / "architecture.md"
    text = "see `onpolicy/gone.py`, gone.md, tests/gone, `onpolicy.gone.f`, onpolicy.errors.Gone"
    assert set(missing_files(text, here, NAMES)) == {"onpolicy/gone.py", "gone.md", "tests/gone"}
    assert set(missing_names(text)) == {"onpolicy.gone.f", "onpolicy.errors.Gone"}
    known = "`errors.py`, ops/base.py, tests/support, rewards.md, onpolicy.errors.ConfigError"
    assert not [*missing_files(known, here, NAMES), *missing_names(known)]


def test_docstrings_begin_with_a_verb_or_a_noun():
    """A relative word, a pronoun or a preposition leaves a reader to guess the subject."""
    without = re.compile(
        "(What|Those|That|Its|Of|By|With|The same|How|Where|Which|As|For|Likewise)\\b"
    )
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    found = [
        f"{file.relative_to(ROOT)}: {text.splitlines()[0]}"
        for file in listed(".py")
        if file.relative_to(ROOT).parts[0] in PACKAGES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "")
        if without.match(text)
    ]
    assert not found, found


def test_the_hooks_are_the_checks_of_make_lint():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    recipe = (ROOT / "Makefile").read_text().partition("\nlint: setup\n")[2].partition("\n\n")[0]
    lint = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    assert [hook["entry"] for hook in repository["hooks"]] == lint
