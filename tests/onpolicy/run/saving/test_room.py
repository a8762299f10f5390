"""A run asks for the room that its own checkpoints take."""

import shutil

import pytest

from onpolicy.errors import ConfigError
from tests.support.policies_in_memory import run_policy
from tests.support.tiny_combinations import make_base
from tests.support.unstarted_run import changed

pytestmark = pytest.mark.usefixtures("undrawn")

FREE = 200_000
"""Bytes. A checkpoint of the adapters takes 35,840, and one of the model more."""


def test_a_disk_with_room_for_adapters_alone_is_large_enough_for_a_run_of_them(
    tmp_path, monkeypatch
):
    save = str(tmp_path / "save")
    whole = changed(make_base(tmp_path), num_rollout=1, save=save, save_interval=1)
    usage = shutil._ntuple_diskusage(2**30, 0, FREE)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"--save=.*: a checkpoint takes"):
        run_policy(whole)
    assert run_policy(changed(whole, lora_rank=4))[0].run_hash
