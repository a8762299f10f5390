"""The ten questions of CONTRIBUTING.md: examples that run, and answers in few files that are there."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTION = PAGE.split("### Ten questions")[1].split("\n## ")[0]
QUESTIONS = re.split(r"^\*\*\d+\. ", SECTION, flags=re.M)[1:]
CODE = re.compile(r"```python\n(.*?)```", re.S)
FILE = re.compile(r"`([\w/]+\.(?:py|toml))`")
NAMED = re.compile(r"`([\w/]+\.py)`\s\(((?:`[\w.]+`(?:,\s)?)+)\)")


def answer(question):
    return CODE.sub("", question)


def named_in(question):
    """{file: the names that the answer says it has}."""
    found = NAMED.findall(answer(question))
    return {file: re.findall(r"[\w.]+", names) for file, names in found}


def defined_in(file):
    """Names of functions, classes and constants of a module, and of methods as CLASS.METHOD."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        for inner in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []:
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(f"{node.name}.{inner.name}")
    return names


def modules_run(code, names):
    """Run an example; return the files of ours whose functions it called."""
    called = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename))
    try:
        exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    finally:
        sys.setprofile(None)
    return {str(Path(f).relative_to(ROOT)) for f in called if Path(f).is_relative_to(ROOT)}


def test_every_question_has_an_example_which_runs_through_a_file_of_its_answer():
    assert len(QUESTIONS) == 10
    names = {}
    for question in QUESTIONS:
        (code,) = CODE.findall(question)
        assert modules_run(code, names) & named_in(question).keys(), question
    assert names["trajectory"].num_sampled == 4


@pytest.mark.parametrize("question", QUESTIONS, ids=range(1, 11))
def test_an_answer_is_in_four_files_at_most_and_each_has_the_parts_that_it_names(question):
    files = set(FILE.findall(answer(question)))
    source = {name for name in files if not name.startswith("tests/onpolicy/")}
    assert 1 <= len(source) <= 4
    assert all((ROOT / name).is_file() for name in files), files
    named = named_in(question)
    assert {name for name in source if name.endswith(".py")} == named.keys()
    assert not {n for file, names in named.items() for n in {*names} - defined_in(file)}


def test_a_part_that_a_file_does_not_have_is_found():
    assert "Operators" in defined_in("onpolicy/ops/base.py")
    assert "EnginePair.work" in defined_in("onpolicy/run/engines.py")
    assert not {"Gone", "EnginePair.gone"} & defined_in("onpolicy/run/engines.py")
