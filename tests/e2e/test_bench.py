"""`onpolicy bench loop` on real engines of both kinds: the same step in turns."""

import json

import pytest

from onpolicy.cli.main import main

pytestmark = pytest.mark.engine


def test_whole_steps_of_both_kinds_are_measured_in_turns(checkpoint, tmp_path, capsys):
    file = tmp_path / "loop.json"
    code = main([
        "bench", "loop", "--hf-checkpoint", str(checkpoint), "--num-prompts", "4",
        "--prompt-len", "8", "--max-new-tokens", "8", "--repetitions", "3", "--json", str(file),
        "--run-dir", str(tmp_path / "run"),
    ])  # fmt: skip
    result = json.loads(file.read_text())
    assert code == 0 and json.loads(capsys.readouterr().out) == result
    for kind in ("aligned", "stock"):
        measured = result[kind]
        assert len(measured["runs"]) == 3 and min(measured["runs"]) > 0
        assert measured["seconds"].keys() == {"rollout", "train", "push"}
        assert (tmp_path / "run" / kind / "logs" / "engine_0.log").exists()
    assert result["ratio"] > 0 and result["num_prompts"] == 4
