"""Names of the hub become local paths of one commit; what goes wrong says which command helps."""

import io
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from onpolicy.cli.command import with_commits
from onpolicy.config import TrainConfig
from onpolicy.config.flags import with_flags
from onpolicy.config.groups import ModelConfig
from onpolicy.config.settings import changes
from onpolicy.errors import ConfigError
from onpolicy.system import hub as product
from tests.support.hub import Hub, served
from tests.support.tiny import make_checkpoint

MAIN = "from onpolicy.cli.main import main; raise SystemExit(main())"
MODEL = {"config.json": b"{}", "model.safetensors": b"x", "pytorch_model.bin": b"y"}


def at(url, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    form = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with served(Hub()) as there:
        at(there.url, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        again()
        yield there
    again()


def path_of(value):
    return product.model_path(value, "--hf-checkpoint")


def again():
    """Forget what was looked up, as another process does."""
    product._commits.clear()


def test_a_name_is_one_commit_for_a_whole_process_though_the_hub_moves_on(hub):
    """verl-project/verl#7658: names without a revision follow `main`, and its parts did not fit."""
    first = hub.push("models", "a/b", MODEL)
    path = path_of("a/b")
    assert path.endswith(f"models--a--b/snapshots/{first}")
    assert sorted(os.listdir(path)) == ["config.json", "model.safetensors"]  # no other forms
    second = hub.push("models", "a/b", {**MODEL, "config.json": b"{ }"})
    assert path_of("a/b") == path == product.model_path("a/b", "--ref-checkpoint")
    assert path_of("a/b@main").endswith(second)  # which says another revision
    again()
    assert path_of("a/b").endswith(second)
    again()
    assert path_of(f"a/b@{first}") == path


def test_every_flag_with_a_checkpoint_or_rows_takes_a_name(hub):
    commit = hub.push("models", "a/b", MODEL)
    rows = hub.push("datasets", "a/b", {"README.md": b""})
    config = with_commits(named("a/b"))
    path = path_of("a/b")
    assert config.data.prompt_data == (f"a/b@{rows}:main:train", "x.jsonl")
    assert path.endswith(commit)
    assert config.model.hf_checkpoint == config.critic.critic_load == path
    assert config.distillation.teacher_checkpoint == (f"math={path}", "/x=1/a")


def named(name):
    """A run with this checkpoint for everything."""
    flags = {
        "hf_checkpoint": name, "ref_checkpoint": name, "critic_load": name,
        "teacher_checkpoint": (f"math={name}", "/x=1/a"),
        "prompt_data": (f"{name}:main:train", "x.jsonl"),
    }  # fmt: skip
    return with_flags(TrainConfig(), flags)


def test_a_directory_of_that_name_wins_and_asks_no_hub(hub, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert path_of("a/b") == "a/b" and path_of("/x/y") == "/x/y" and path_of("x/y/z") == "x/y/z"
    assert hub.asked == []


def test_without_the_hub_the_cache_is_enough_or_the_command_is_named(hub, monkeypatch):
    """huggingface/huggingface_hub#4487: a cached checkpoint has to be found without a network."""
    commit = hub.push("models", "a/b", MODEL)
    path = path_of("a/b")
    for offline in (True, False):
        again()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        at("http://127.0.0.1:9", monkeypatch)
        assert path_of("a/b") == path and path_of(f"a/b@{commit}") == path
        with pytest.raises(
            ConfigError, match=r"--hf-checkpoint=a/c: .*cannot be reached.*download a/c`"
        ):
            path_of("a/c")


def test_what_the_hub_refuses_says_which_command_helps(hub):
    hub.push("models", "a/gated", MODEL)
    hub.gated.add("a/gated")
    for name, rule in {
        "a/gated": r"is gated. Ask for access at http.*/a/gated, then run `hf auth login`",
        "a/none": "no such path on this host, and http.* has no such model, or a private one",
        "a/gated@v9": "/a/gated has no such revision. Give a branch, a tag or a commit hash",
    }.items():
        with pytest.raises(ConfigError, match=f"--hf-checkpoint={name}: .*{rule}"):
            path_of(name)


def test_a_resumed_run_compares_commits_and_not_caches():
    def run(cache, commit):
        path = f"{cache}/models--Qwen--Qwen3-0.6B/snapshots/{commit * 40}"
        return TrainConfig(model=ModelConfig(hf_checkpoint=path))

    assert changes(run("/x", "a").to_dict(), run("/y", "a")) == []
    (change,) = changes(run("/x", "a").to_dict(), run("/x", "b"))
    now, was = (f'"Qwen/Qwen3-0.6B@{commit * 40}"' for commit in "ba")
    assert str(change) == f"--hf-checkpoint={now}, was {was}"


def test_data_reads_a_checkpoint_and_rows_by_their_names(hub, tmp_path):
    """huggingface/huggingface_hub#3406 is of files that no longer are of the commit that is named."""
    made = make_checkpoint(tmp_path / "made")
    files = {x.name: x.read_bytes() for x in made.iterdir()}
    hub.push("models", "Qwen/tiny", files)

    def rows(*texts):
        table, out = pyarrow.table({"question": texts, "answer": ["1"] * len(texts)}), io.BytesIO()
        pyarrow.parquet.write_table(table, out)
        return out.getvalue()

    card = b"---\nconfigs:\n" + b"".join(
        b"- config_name: %s\n  data_files:\n  - split: train\n    path: %s/train-*\n" % (each, each)
        for each in (b"main", b"other")
    )
    repository = {
        "README.md": card + b"---\n",
        "main/train-00000-of-00001.parquet": rows("abc", "def"),
        "other/train-00000-of-00001.parquet": rows("ghi"),
    }
    hub.push("datasets", "openai/gsm8k", repository)

    def look(name, **more):
        command = [
            sys.executable, "-c", MAIN, "data", name, "--hf-checkpoint", "Qwen/tiny",
            "--input-key", "question", "--label-key", "answer",
        ]  # fmt: skip
        ours = {"PYTHONPATH": str(Path(__file__).parents[3])}
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        return subprocess.run(
            command,
            env={**os.environ, **ours, **home, **more},
            capture_output=True,
            text=True,
            timeout=300,
        )

    first = look("openai/gsm8k:train")
    assert first.returncode == 0 and "'abc'" in first.stdout, first.stderr
    again_offline = look("openai/gsm8k:train", HF_HUB_OFFLINE="1")
    assert again_offline.stdout == first.stdout
    wrong = look("openai/gsm8k:other:tes")
    assert wrong.returncode == 2 and "tes" in wrong.stderr and "train" in wrong.stderr
    assert "Traceback" not in wrong.stderr
