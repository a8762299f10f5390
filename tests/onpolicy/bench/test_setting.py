"""What is measured: the two kinds differ in their operators, and in what these need."""

import pytest

from onpolicy.bench.setting import make_train_config
from onpolicy.config.tool_flags import BenchConfig

LOOP = BenchConfig(what="loop", num_prompts=3, n_samples_per_prompt=5)


def test_stock_steps_of_the_loop_weigh_their_samples_and_aligned_ones_need_not():
    aligned, stock = (make_train_config(LOOP, kind) for kind in ("aligned", "stock"))
    assert aligned.parity.true_on_policy_mode and not aligned.fallback.use_tis
    assert stock.fallback.use_tis and not stock.parity.true_on_policy_mode
    assert aligned.samples_per_rollout == stock.samples_per_rollout == 15


@pytest.mark.parametrize("what", ["rollout", "step"])
def test_other_benchmarks_correct_nothing(what):
    assert not make_train_config(BenchConfig(what=what), "stock").fallback.use_tis
