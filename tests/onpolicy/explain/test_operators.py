"""What cannot be shared out among operators is refused before, or as soon as, it is known."""

import dataclasses

import pytest
import torch

from onpolicy.errors import ConfigError
from onpolicy.explain import operators
from onpolicy.explain.taps.recorder import Recorder
from onpolicy.explain.taps.recording import Recording
from onpolicy.models.policy import PackedTokens
from tests.onpolicy.models.test_policy import load_policy, random_sequences
from tests.support.recorded_policies import recording
from tests.support.tiny_contract import CONTRACT

DENSE = dataclasses.replace(CONTRACT, shapes=dataclasses.replace(CONTRACT.shapes, experts=()))


def test_megatrons_mixtures_and_gpus_are_refused():
    operators._require_recorded(CONTRACT, "fsdp")
    operators._require_recorded(DENSE, "megatron")
    with pytest.raises(
        ConfigError, match="--attribution=operators: of mixtures it has the rows of"
    ):
        operators._require_recorded(CONTRACT, "megatron")
    with pytest.raises(ConfigError, match="--attribution=operators: it has not run on a GPU"):
        operators._require_recorded(dataclasses.replace(DENSE, device="cuda"), "fsdp")


def test_sequences_of_which_routers_leave_too_few_are_refused():
    operators._require_several(2, 8, others=6)
    with pytest.raises(ConfigError, match="other experts for 6 tokens, and before these 1 of 8"):
        operators._require_several(1, 8, others=6)


def test_the_room_that_rows_take_is_known_from_their_digests(checkpoint, monkeypatch):
    policy, sequences = load_policy(checkpoint), random_sequences([20, 7])
    with recording(policy, Recorder(keeps_rows=True)) as passes, torch.no_grad():
        policy(PackedTokens.after_prompts(sequences, [1, 1], 1.0))
    kept = sum(
        rows.numel() * rows.element_size()
        for call in passes[0]
        for rows in (*call.rows[0], *call.rows[1])
    )
    recorded = Recording.of(passes)
    monkeypatch.setattr(operators, "MOST_BYTES", kept)
    operators._require_room(recorded)
    monkeypatch.setattr(operators, "MOST_BYTES", kept - 1)
    with pytest.raises(ConfigError, match=r"the rows of all operators take .* Lower --num-prompts"):
        operators._require_room(recorded)
