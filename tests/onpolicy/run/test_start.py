"""What a contract is refused for before anything is started."""

import pytest
import torch

from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.run.start import make_contract


def contract(checkpoint, **changes):
    settings = {"dtype": "bfloat16", "aligned": True, **changes}
    return make_contract(str(checkpoint), load_config(str(checkpoint)), **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_the_operators_are_the_cpus(checkpoint, caplog):
    caplog.set_level("INFO", "onpolicy")
    made = contract(checkpoint)
    assert (made.backend, made.device, made.model_definition) == ("cpu", "cpu", "transformers")
    assert "aligned operators: cpu, bfloat16" in caplog.text
    with pytest.raises(ConfigError, match=r"--operators=hopper: this machine has no GPU"):
        contract(checkpoint, operators="hopper")


def test_a_variable_that_breaks_alignment_is_refused_in_aligned_runs_only(checkpoint, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(ConfigError, match=r"NVIDIA_TF32_OVERRIDE=1: not with"):
        contract(checkpoint)
    assert contract(checkpoint, aligned=False).backend == "stock"
