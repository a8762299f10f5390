"""A resumed run has the weights that it was saved with, those of its base among them."""

import json

import pytest
from safetensors.torch import load_file, save_file

from onpolicy.errors import CheckpointError
from tests.support.policies_in_memory import run_policy
from tests.support.tiny_combinations import make_base
from tests.support.unstarted_run import changed

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def resumed(tmp_path):
    """Makes the second of two rollouts from a checkpoint of the first."""
    base = changed(make_base(tmp_path), lora_rank=4)
    save = str(tmp_path / "save")
    first = changed(base, num_rollout=1, save=save, save_interval=1)
    run_policy(first)

    def go_on(**values):
        directory = str(tmp_path / "again")
        return run_policy(changed(base, load=save, run_dir=directory, **values))[0]

    return base, go_on


def change_base(config):
    """One number of the embedding."""
    file = f"{config.model.hf_checkpoint}/model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][7, 3] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})


def test_the_hash_is_that_of_the_undisturbed_run(resumed):
    base, go_on = resumed
    assert go_on().run_hash == run_policy(base)[0].run_hash


def test_another_base_under_the_same_path_is_refused(resumed):
    base, go_on = resumed
    change_base(base)
    with pytest.raises(CheckpointError, match=r"--load=.*: the trainer has other weights .* Put"):
        go_on()


def test_without_the_digest_nothing_is_noticed(resumed, tmp_path, monkeypatch):
    base, go_on = resumed
    change_base(base)
    monkeypatch.setattr("onpolicy.run.saving.resume.versions", lambda: {"another": "version"})
    assert go_on().run_hash
    state = json.loads((tmp_path / "save/step_000001/state.json").read_text())
    assert len(state["weights"]) == 16
