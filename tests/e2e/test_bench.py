"""`onpolicy bench loop` and `decode` on real engines of both kinds: the same work in turns."""

import json

import pytest

from onpolicy.cli.main import main

pytestmark = [pytest.mark.engine, pytest.mark.runs]


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


def test_prefill_and_decoding_are_measured_apart_for_what_fits(checkpoint, tmp_path):
    file = tmp_path / "decode.json"
    argv = [
        "bench", "decode", "--hf-checkpoint", str(checkpoint), "--batch-sizes", "1", "3",
        "--context-lens", "8", "40", "5000", "--max-new-tokens", "4", "--repetitions", "2",
        "--sglang-max-total-tokens", "120", "--json", str(file), "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    assert main(argv) == 0
    result = json.loads(file.read_text())
    measured = {(cell["batch_size"], cell["context_len"]): cell for cell in result["cells"]}
    assert measured.keys() == {(1, 8), (3, 8), (1, 40)}
    for cell in measured.values():
        for phase in ("prefill", "decode"):
            assert cell[phase]["ratio"] > 0
            for kind in ("aligned", "stock"):
                assert len(cell[phase][kind]["runs"]) == 2 and min(cell[phase][kind]["runs"]) > 0
    why = {
        (cell["batch_size"], cell["context_len"]): cell["why"] for cell in result["not_measured"]
    }
    assert why == {
        (3, 40): "a server's cache of 120 tokens does not hold 156",
        (1, 5000): "the model's context has 256 tokens",
        (3, 5000): "the model's context has 256 tokens",
    }
