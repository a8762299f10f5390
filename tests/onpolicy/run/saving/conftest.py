"""Real checkpoints of a tiny run, saved once and copied for every test that damages them."""

import shutil

import pytest

from onpolicy.run import saving
from tests.support.unstarted_run import make_config, make_run, state_after


@pytest.fixture(scope="session")
def saved(checkpoint, tmp_path_factory):
    """Checkpoints after 2 and 4 rollouts."""
    directory = tmp_path_factory.mktemp("saved")
    config, engines = make_run(checkpoint, directory)
    for done in (2, 4):
        saving.save(config, engines, state_after(done))
    return directory / "save"


@pytest.fixture
def run(checkpoint, saved, tmp_path):
    """The configuration of a run that resumes from copies of them, and where they are."""
    save = shutil.copytree(saved, tmp_path / "save")
    return make_config(checkpoint, tmp_path), save
