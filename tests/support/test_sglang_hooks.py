"""What a new SGLang moved is said by name, from its source alone."""

import sysconfig
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from sglang_patches import lm_head
from tests.support import sglang_hooks, sglang_version
from tests.support.sglang_hooks import differences, find, targets

INSTALLED = Path(sysconfig.get_path("purelib"))

MODULES = {
    "__init__.py": "",
    "srt/__init__.py": "from sglang.srt.first import *\nfrom .second import moved_here as known_as\n",
    "srt/first.py": "try:\n    import fast\nexcept ImportError:\n    def fallback(x, *, y=1): ...\n",
    "srt/second.py": (
        "class Owner:\n    def method(self, x): ...\n\ndef moved_here(a): ...\nVALUE: int = 1\n"
    ),
}


@pytest.fixture
def tree(tmp_path):
    def write(name, modules):
        for file, text in modules.items():
            path = tmp_path / name / "sglang" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("srt.second.Owner.method", "self, x"),
        ("srt.second.VALUE", None),
        ("srt.second", None),
        ("srt.fallback", "x, *, y=1"),  # in a branch, behind a star
        ("srt.known_as", "a"),  # a relative import under another name
    ],
)
def test_a_name_is_found_as_importing_would_find_it(tree, target, arguments):
    new = tree("new", MODULES)
    assert find(new, f"sglang.{target}")[1] == arguments
    assert find(new, f"sglang.{target}.gone") is None


def test_every_hook_of_the_plug_in_is_in_the_pinned_sglang():
    assert lm_head.TARGET in targets()  # replaced
    assert any("flash_attn" in name for name in targets())  # a GPU's
    assert differences(INSTALLED, INSTALLED) == ([], [])


def test_a_hook_that_moved_is_named_with_where_it_went_and_new_arguments_with_the_old(
    tree, monkeypatch
):
    names = ("sglang.srt.second.moved_here", "sglang.srt.second.Owner.method")
    monkeypatch.setattr(sglang_hooks, "targets", lambda: dict.fromkeys(names, "ours"))
    elsewhere = {
        "srt/second.py": "class Owner:\n    def method(self, x, z=0): ...\n",
        "srt/third.py": "def moved_here(a): ...\n",
    }
    missing, changed = differences(tree("new", MODULES | elsewhere), tree("old", MODULES))
    assert len(missing) == len(changed) == 1
    assert missing[0].startswith(names[0]) and "sglang/srt/third.py" in missing[0]
    assert "(self, x, z=0), where the pinned version takes (self, x)" in changed[0]


def test_requirements_have_what_that_sglang_pins_and_keep_the_rest(tmp_path):
    info = tmp_path / "sglang-9.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Name: sglang\nVersion: 9\nRequires-Dist: transformers==7.1\n"
        "Requires-Dist: Open_AI[extra]==2.0\nRequires-Dist: torch==3.0; sys_platform == 'linux'\n"
        "Requires-Dist: numpy>=2\nRequires-Dist: pytest==1; extra == 'test'\n"
    )
    pinned = sglang_version.pins(tmp_path)
    assert pinned == {"transformers": "7.1", "open-ai": "2.0", "torch": "3.0"}
    text = "# transformers==1\ntransformers==5.1\nopen.ai==1.0\nnumpy==2.4\ntokenizers==0.9\n"
    assert sglang_version.repinned(text, pinned) == (
        "# transformers==1\ntransformers==7.1\nopen.ai==2.0\nnumpy==2.4\ntokenizers\n"
    )
    same = text.replace("5.1", "7.1").replace("open.ai==1.0", "open.ai==2.0")
    assert sglang_version.repinned(same, pinned) == same


def test_the_pins_of_this_repository_are_those_of_the_sglang_it_pins():
    """Other versions than SGLang asks for would be another engine than users have."""
    (info,) = INSTALLED.glob("sglang-*.dist-info")
    pinned = sglang_version.pins(INSTALLED) | {"sglang": PathDistribution(info).version}
    for name in ("cpu.txt", "cpu-no-deps.txt"):
        text = (sglang_version.REQUIREMENTS / name).read_text()
        assert sglang_version.repinned(text, pinned) == text
