"""The comparison after every push, where samples are too old to be compared in training."""

import pytest
import torch

from onpolicy.errors import ParityError
from tests.support.engines_in_memory import Host
from tests.support.run_in_memory import records_of, run_in_memory
from tests.support.trainer_in_memory import TrainerInMemory

pytestmark = pytest.mark.usefixtures("one_process")

LAG = {"rollout_lag": 1, "num_rollout": 3}


@pytest.fixture
def one_bit_off(monkeypatch):
    """A trainer that scores one token of the third probe as the neighbouring number."""
    calls, rescore = [], TrainerInMemory.rescore

    def off(self, *args):
        scores = rescore(self, *args)
        calls.append(args)
        if len(calls) == 3:
            scores[1].log_probs[0] = torch.nextafter(scores[1].log_probs[0], torch.tensor(0.0))
        return scores

    monkeypatch.setattr(TrainerInMemory, "rescore", off)


def test_every_engine_answers_every_request_of_the_probe_after_every_push(tmp_path):
    host = Host()
    run_in_memory(tmp_path, host, rollout_num_engines=3, eval_sets={}, **LAG)
    records = records_of(tmp_path)
    assert len({record["probe/num_compared_tokens"] for record in records}) > 1  # as it learns
    assert [record["probe/num_mismatched_tokens"] for record in records] == [0, 0, 0]
    probed = [
        {request for request, times in engine.answered.items() if times == 4}
        for engine in host.engines
    ]
    assert len(probed[0]) == 4 and probed[0] == probed[1] == probed[2]


def test_one_bit_ends_an_aligned_run_before_it_trains_on_samples_of_that_version(
    tmp_path, one_bit_off
):
    with pytest.raises(ParityError, match=r"^version 2: 1 of \d+ tokens of the probe"):
        run_in_memory(tmp_path, eval_sets={}, **LAG)
    assert [record["step"] for record in records_of(tmp_path)] == [0]


def test_or_is_logged_and_counted_if_the_policy_is_to_warn(tmp_path, one_bit_off, caplog):
    summary = run_in_memory(tmp_path, eval_sets={}, parity_policy="warn", **LAG)
    assert [record["probe/num_mismatched_tokens"] for record in records_of(tmp_path)] == [0, 1, 0]
    assert summary.totals.num_mismatched_tokens == 1
    assert "1 of" in caplog.text and "tokens of the probe" in caplog.text


def test_a_run_that_does_not_lag_is_not_probed(tmp_path):
    run_in_memory(tmp_path, eval_sets={}, num_rollout=1)
    assert not any(name.startswith("probe/") for name in records_of(tmp_path)[0])
