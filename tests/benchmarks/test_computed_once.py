"""One run computes prompts once, in its trainer and on its servers; the other does neither."""

import pytest

from benchmarks import computed_once
from benchmarks.prefill_once import KINDS
from onpolicy.config import groups
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config


class Started(Exception):
    pass


@pytest.mark.parametrize("kind", ["once", "each"])
def test_a_run_computes_prompts_once_on_both_sides_or_on_none(checkpoint, tmp_path, kind):
    def make_engines(config, hf_config, contract, *args, make_rollout, **kwargs):
        assert contract.is_aligned
        assert config.trainer.shares_prefixes == (kind == "once")
        assert make_rollout.keywords["extensions"] == KINDS[kind]
        assert bool(KINDS[kind]) == (kind == "each")
        raise Started

    model = groups.CheckpointConfig(hf_checkpoint=str(checkpoint))
    config = BenchConfig(what="loop", model=model, run_dir=str(tmp_path))
    with (
        pytest.raises(Started),
        computed_once.started(config, load_config(str(checkpoint)), kind, make_engines),
    ):
        pass
