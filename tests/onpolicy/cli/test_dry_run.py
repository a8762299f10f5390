"""What a dry run takes to check a run."""

import json
import subprocess
import sys

import pytest

from tests.support.chat_tokenizers import PLAIN, byte_tokenizer
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import ROOT

HEAVY = {"torch", "sglang", "ray", "matplotlib", "math_verify", "torch.distributed.checkpoint"}


@pytest.mark.long
def test_a_dry_run_of_the_quickstart_imports_torch_for_its_contract_and_no_engine(tmp_path):
    """The shapes that a contract holds, and whether its model can be aligned, are those of the model
    that transformers builds without weights; which operators there are is torch's word."""
    model = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1, vocab_size=400)
    byte_tokenizer(PLAIN).save_pretrained(model)
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "label": f"{i + 1}"}) + "\n" for i in range(32))
    )
    argv = [
        "train", "--custom-config-path", str(ROOT / "examples/quickstart/config.yaml"),
        "--hf-checkpoint", str(model), "--prompt-data", str(data), "--eval-prompt-data", str(data),
        "--run-dir", str(tmp_path / "run"), "--dry-run",
    ]  # fmt: skip
    code = f"import sys; from onpolicy.cli.main import main; assert main({argv}) == 0"
    code += f"; print(*sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["torch"]
