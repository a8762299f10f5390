"""Adapters whose rollout is a stock server: it has none, and gets weights that they are merged into."""

import json

import pytest
import torch

from onpolicy.config import groups
from onpolicy.models.lora.merged import Updates
from onpolicy.parity import compare_log_probs
from onpolicy.run.commands.verification import fill_with_drawn
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training import make_trainer
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.train_runs import finish, metrics_of

pytestmark = [pytest.mark.engine, pytest.mark.runs]

STOCK = ("--no-true-on-policy-mode",)
LORA = ("--lora-rank", "8", "--use-tis", "--num-rollout", "2", "--cpu-threads", "1")
CLOSE = 1e-9
"""k3 in nats per token of two kernels in float32, of the same weights."""


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory):
    lora = groups.LoraConfig(lora_rank=4)
    engines = make_engines(checkpoint, tmp_path_factory.mktemp("run"), lora=lora, aligned=False)
    with running(engines) as pair:
        yield pair


def k3_of(pair, monkeypatch):
    """Of answers to a push of adapters that are drawn, B too."""
    contract = contract_for(pair.config, pair.hf_config, aligned=False)
    assert contract.of_engine == pair.contract.of_engine
    trainer = make_trainer(pair.config, contract, 1)
    fill_with_drawn(trainer, 0)
    monkeypatch.setattr(pair, "trainer", trainer)
    pair.push_weights(pair.weight_version + 1)
    (client,) = pair.rollout.clients
    assert client.report()["weights"] == pair.weight_digest
    return scored(pair).metrics()["train/k3_kl"], trainer.push_metrics


def scored(pair):
    """What is between the log-probabilities of both sides."""
    requests = make_requests(6, seed=3)
    completions = pair.generate(requests)
    scores = pair.score(requests, completions, 1.0)
    rollout = torch.cat([torch.tensor(c.rollout_log_probs) for c in completions])
    return compare_log_probs(torch.cat(scores), rollout)[0]


def test_a_stock_server_samples_from_the_merged_weights(pair, monkeypatch):
    k3, metrics = k3_of(pair, monkeypatch)
    assert k3 < CLOSE
    assert metrics["lora/merged_changed"] > 0.9 and metrics["lora/merged_rounding"] < 1e-3


def test_without_the_merge_it_samples_from_another_model(pair, monkeypatch):
    monkeypatch.setattr(Updates, "added", lambda self, name, base, dtype, _: base.to(dtype))
    k3, _ = k3_of(pair, monkeypatch)
    assert k3 > 1e3 * CLOSE


def test_a_run_learns_reports_what_merging_cost_and_goes_on_from_the_same_weights(start, tmp_path):
    save, argv = tmp_path / "save", [*LORA, "--dtype", "float32", "--save-interval", "1"]
    finish(start(tmp_path / "a", *argv, "--save", str(save), mode=STOCK))
    first, second = metrics_of(tmp_path / "a")
    assert costs(first) == [0, 0]  # B is zeros
    assert 0.5 < costs(second)[0] <= 1 and 0 < costs(second)[1] < 0.1
    for record in (first, second):
        assert 0 < record["mismatch/k3"] < CLOSE
        assert record["train/grad_norm"] > 0
    # A stock server's samples are other ones each time; the push before them has the saved digest.
    assert json.loads((save / "step_000001" / "state.json").read_text())["weights"]
    argv += ["--load", str(save / "step_000001"), "--save", str(tmp_path / "other")]
    finish(start(tmp_path / "b", *argv, mode=STOCK))
    (resumed,) = metrics_of(tmp_path / "b")
    assert costs(resumed) == costs(second)


def costs(record):
    return [record["lora/merged_changed"], record["lora/merged_rounding"]]


def test_under_megatron_too_and_a_governed_run_goes_to_aligned_servers_and_back(start, tmp_path):
    """Rungs: mis 2, decay 3, aligned 4; it is resumed where its last push was to aligned servers."""
    pytest.importorskip("megatron.core")
    save = str(tmp_path / "save")
    argv = [
        *LORA, "--train-backend", "megatron", "--use-rs", "--mismatch-governor",
        "--governor-k3", "1e-9", "--governor-rise-after", "1", "--governor-fall-after", "1",
        "--save", save, "--load", save, "--save-interval", "2",
    ]  # fmt: skip
    finish(start(tmp_path, *argv, mode=STOCK))
    finish(start(tmp_path, *argv, "--num-rollout", "3", mode=STOCK))
    first, second, aligned = records = metrics_of(tmp_path)
    assert [record["governor/rung"] for record in records] == [3, 4, 3]
    assert costs(first)[0] == 0 < first["mismatch/k3"]
    changed, rounding = costs(second)  # of which bfloat16 leaves less than float32
    assert 0 < changed < 0.95 and rounding > 0.05
    assert second["parity/num_mismatched_tokens"] > 0
    assert aligned["parity/num_mismatched_tokens"] == 0 < aligned["parity/num_compared_tokens"]
    assert not [name for name in aligned if name.startswith("lora/merged")]
