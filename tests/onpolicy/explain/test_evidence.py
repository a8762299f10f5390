"""A call of a real trainer, whose weights FSDP2 frees after its forward pass, made again elsewhere."""

import pytest

from onpolicy.explain.microscope import recording
from onpolicy.explain.proof import prove
from onpolicy.explain.taps.recorder import CHOSEN_EXPERTS, Recorder, Recording
from onpolicy.ops import make_operators
from onpolicy.training import make_trainer
from tests.onpolicy.models.test_policy import random_sequences
from tests.support.engines_fixture import make_engines
from tests.support.tiny import make_checkpoint

SEQUENCES = random_sequences([30, 21])


def recorded(trainer, recorder):
    with recording(trainer.policy, recorder) as (_, passes):
        trainer.log_probs(SEQUENCES, [3, 3], 1.0)
    return Recording.of(passes)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe", "olmo"])
def test_every_operator_alone_gives_the_trainers_bits(architecture, tmp_path):
    pair = make_engines(make_checkpoint(tmp_path / "model", architecture), tmp_path)
    trainer, operators = make_trainer(pair.config, pair.contract, 1), make_operators(pair.contract)
    sites = recorded(trainer, Recorder())
    for site, by_rank in sites.items():
        if site[1] in ("embedding", CHOSEN_EXPERTS):  # which are no operators
            continue
        recorder = Recorder()
        keys = by_rank[0].keys
        recorder.suspect = site, int(keys[len(keys) // 2]), 0
        recorded(trainer, recorder)
        evidence = recorder.evidence
        proof = prove({0: evidence}, evidence, operators)
        assert (proof.in_train_shape, proof.same_in_both) == (True, True), site
        assert (proof.verdict, proof.difference.different) == ("not reproduced", 0)
