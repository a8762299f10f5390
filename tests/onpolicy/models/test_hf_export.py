"""What a run exports is a checkpoint for anybody: no part of onpolicy is needed to use it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from onpolicy.run import saving
from onpolicy.training.advantages import RewardEstimator
from tests.support.samples import make_train_sample
from tests.support.tiny import make_tokenizer
from tests.support.unstarted_run import make_run, state_after

PROMPT = "onpolicy"
PLAIN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
inputs = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")
logits = model(**inputs).logits.detach()
torch.save(logits, "logits.pt")
tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False)
ours = [name for name in sys.modules if name.split(".")[0] in ("onpolicy", "sglang")]
print(json.dumps([tokens[0].tolist(), str(logits.dtype), ours]))
"""


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    """(the trainer's weights after a step, the exported checkpoint)"""
    directory = tmp_path_factory.mktemp("run")
    config, engines = make_run(checkpoint, directory)
    trainer = engines.trainer
    trainer.learner.estimator = RewardEstimator("reinforce")  # of a sample that is alone
    sequence = list(range(2, 40))
    (log_probs,) = trainer.log_probs([sequence], [4], 1.0)
    sample = make_train_sample(sequence, 4, log_probs.tolist(), reward=1.0)
    trainer.train([sample], step=0, rates=[1e-6])
    saving.save(config, engines, state_after(1))
    weights = {n: t for bucket in trainer.policy.weight_buckets(1 << 30) for n, t in bucket}
    return weights, directory / "save" / "step_000001" / "hf"


def test_plain_transformers_loads_it_and_computes_what_the_trained_weights_say(
    checkpoint, exported, tmp_path
):
    """Stock against stock: transformers' own operators there, and on the trainer's weights here."""
    weights, path = exported
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(path), PROMPT],
        env={**os.environ, "HOME": str(tmp_path)},  # the kernels of this process, too
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tokens, dtype, ours = json.loads(done.stdout)
    assert not ours
    assert dtype == "torch.float32"

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)
    assert any(not torch.equal(original[name], tensor) for name, tensor in weights.items())
    inputs = make_tokenizer()(PROMPT, return_tensors="pt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(torch.load(tmp_path / "logits.pt"), model(**inputs).logits)
        assert tokens == model.generate(**inputs, max_new_tokens=5, do_sample=False)[0].tolist()
    finally:
        torch.set_num_threads(threads)


def test_importing_onpolicy_changes_nothing():
    code = (
        "import sys; before = list(sys.meta_path); import onpolicy; print(before == sys.meta_path)"
    )
    code += "; print([name for name in sys.modules if name == 'torch' or 'onpolicy.' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n[]\n"
