import json
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoModelForImageTextToText

from onpolicy.cli.main import main
from tests.support.chat_tokenizers import PLAIN, byte_tokenizer
from tests.support.tiny import make_checkpoint
from tests.support.tiny_images import encoded_image, write_image_checkpoint_files

LONG = "a" * 300
ROWS = [
    {"prompt": "1+1", "label": 2, "index": 4}, {"prompt": "1+1", "label": 2},
    {"prompt": "1+22", "label": [2]}, {"prompt": "1+3", "label": None},
    {"prompt": LONG, "label": 3},
]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def lines(capsys):
    return {line[:12].strip(): line[12:] for line in capsys.readouterr().out.splitlines()[-10:]}


def test_rows_fields_lengths_duplicates_and_what_a_run_would_refuse(capsys, file):
    assert main(["data", file]) == 1
    said = lines(capsys)
    assert said["rows"] == "5"
    assert said["fields"] == "prompt, label, index (in 1)"
    assert said["duplicates"] == "1"
    assert said["no label"] == "1; --rm-type math, dapo and exact need one"
    assert said["characters"] == "min 3  median 3  90 % 300  99 % 300  max 300"
    assert said["refused"] == "1"
    assert said["1"].startswith(f"FILE={file}:3: label=[2]. A label must be")
    assert said["row 1"] == "'1+1'"


def test_a_checkpoint_says_which_are_too_long_and_what_its_template_makes(capsys, file, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1, vocab_size=400)
    byte_tokenizer(PLAIN).save_pretrained(checkpoint)
    argv = ["data", file, "--hf-checkpoint", str(checkpoint), "--apply-chat-template"]
    assert main([*argv, "--rollout-max-response-len", "28"]) == 1
    said = lines(capsys)
    assert said["tokens"].startswith("min ")
    assert said["too long"].startswith("1 of more than ")
    assert said["too long"].endswith(f"the first FILE={file}:5")
    assert "1+1<|im_end|>" in said["row 1"]


def test_images_are_counted_in_tokens_and_refused_without_the_flag(capsys, tmp_path):
    checkpoint = write_image_checkpoint_files(tmp_path / "model", "qwen3_vl")
    written = (checkpoint / "config.json").read_text()
    config = AutoConfig.from_pretrained(checkpoint)
    AutoModelForImageTextToText.from_config(config).save_pretrained(checkpoint)
    (checkpoint / "config.json").write_text(written)
    (tmp_path / "red.png").write_bytes(encoded_image(size=(64, 64)))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "<image>?", "images": ["red.png"], "label": "x"}\n')
    argv = ["data", str(path), "--hf-checkpoint", str(checkpoint)]
    assert main([*argv, "--images"]) == 0
    said = lines(capsys)
    assert said["tokens"].startswith("min 19 ")  # 16 of the image, one on either side, "?"
    assert said["row 1"] == "'<|vision_start|><|image_pad|><|vision_end|>?'"
    assert main(argv) == 1
    assert "With --images a gemma3 or qwen3_vl" in lines(capsys)["1"]
    assert main(["data", str(path), "--images"]) == 2
    assert "Add --hf-checkpoint" in capsys.readouterr().err


def test_of_rows_that_are_all_refused_none_is_shown_as_read(capsys, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}], "label": "x"}\n')
    assert main(["data", str(path), "--input-key", "messages"]) == 1
    said = lines(capsys)
    assert "Add --apply-chat-template" in said["1"] and "row 1" not in said


HEAVY = {"torch", "transformers", "sglang", "ray", "math_verify"}


@pytest.mark.parametrize(
    ("flags", "brought"),
    [
        ([], set()),
        (["--rm-type", "exact"], set()),
        # transformers imports torch for a configuration, whatever is asked of it.
        (["--hf-checkpoint", "{model}"], {"torch", "transformers"}),
    ],
)
def test_a_look_imports_no_more_than_what_it_looks_with(file, tmp_path, flags, brought):
    model = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1, vocab_size=400)
    byte_tokenizer(PLAIN).save_pretrained(model)
    argv = ["data", file, *(flag.format(model=model) for flag in flags)]
    code = f"import sys; from onpolicy.cli.main import main; main({argv})"
    code += f"; print(*sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.splitlines()[-1].split()} == brought


def test_labels_that_a_rule_cannot_read_are_refused_as_a_run_would(capsys, tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{i}", "label": x} for i, x in enumerate(["1", r"\frac{1}{2", r"\sqrt{3}"])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data", str(path), "--rm-type", "math"]) == 1
    said = lines(capsys)
    assert said["refused"] == "1"
    assert said["1"].startswith(
        f"FILE={path}:2: label='\\\\frac{{1}}{{2': --rm-type=math cannot read it"
    )
    assert main(["data", str(path)]) == 0


def test_problems_of_reasoning_gym_are_looked_at(capsys):
    assert main(["data", "reasoning-gym:chain_sum", "--reasoning-gym-size", "3"]) == 0
    assert lines(capsys)["rows"] == "3"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "FILE is missing"),
        (["none.jsonl"], "FILE=none.jsonl: cannot be read"),
        (["a.jsonl", "--apply-chat-template"], "Add --hf-checkpoint DIR"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(capsys, argv, message):
    assert main(["data", *argv]) == 2
    assert message in capsys.readouterr().err
