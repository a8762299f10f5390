"""The five first questions of CONTRIBUTING.md: what stands there runs, and names few files."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTION = PAGE.split("### Five first questions")[1].split("\n## ")[0]
CODE = re.compile(r"```python\n(.*?)```", re.S)


def test_each_question_has_an_example_and_all_of_them_run_in_their_order():
    questions = re.split(r"^\*\*Where ", SECTION, flags=re.M)[1:]
    assert len(questions) == len(CODE.findall(SECTION)) == 5
    names = {}
    for example in CODE.findall(SECTION):
        exec(compile(example, "CONTRIBUTING.md", "exec"), names)
    assert names["trajectory"].num_sampled == 4


def test_each_answer_is_in_three_files_at_most():
    for question in re.split(r"^\*\*Where ", SECTION, flags=re.M)[1:]:
        files = set(re.findall(r"`([\w/]+\.py)`", CODE.sub("", question)))
        source = {name for name in files if not name.startswith("tests/")}
        assert 1 <= len(source) <= 3, question
        assert all((ROOT / name).is_file() for name in files), files
