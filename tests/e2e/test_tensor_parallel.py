"""A rollout on two tensor-parallel ranks and a trainer on one: the same bits, and how a miss shows."""

import base64
import itertools
import pickle
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from onpolicy.errors import WeightSyncError
from onpolicy.explain.findings import told
from onpolicy.models.align import AlignedLinear
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.parity import compare_log_probs
from onpolicy.training.weight_outlet import WeightOutlet
from onpolicy.weights.push import push_weights
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport
from tests.support.engines_fixture import make_requests, nudge
from tests.support.microscopes import running_microscope
from tests.support.processes import engine_processes, listening_addresses
from tests.support.prompt_scores import ask_of_prompts, of_prompt

pytestmark = pytest.mark.engine

versions = itertools.count(1)


@pytest.fixture(scope="module")
def microscope(checkpoint, tmp_path_factory):
    with running_microscope(checkpoint, tmp_path_factory.mktemp("tp"), tp_size=2) as one:
        yield one


@pytest.fixture(scope="module")
def engines(microscope):
    """A server of two ranks, which are recorded, and a trainer in float32."""
    return microscope.engines


def count_mismatches(engines, seed):
    """Of answers to requests of which every other one has filters."""
    sampled = make_requests(16, seed=seed, temperature=0.7)
    for i in range(0, 16, 2):
        filtered = replace(sampled[i].params, top_k=60, top_p=0.9, min_p=0.01)
        sampled[i] = replace(sampled[i], params=filtered)
    completions = engines.generate(sampled)
    assert [bool(c.kept_tokens) for c in completions] == [True, False] * 8
    scored = engines.trainer.log_probs(
        [[*r.prompt_ids, *c.response_ids] for r, c in zip(sampled, completions, strict=True)],
        [len(request.prompt_ids) for request in sampled],
        0.7,
        [c.kept_tokens for c in completions],
    )
    log_probs = torch.tensor([x for c in completions for x in c.rollout_log_probs])
    return compare_log_probs(torch.cat(scored), log_probs)[0].num_mismatched


def test_no_token_differs(engines):
    assert engines.contract.row_parallel_blocks == 2
    assert engines.rollout.clients[0].report()["tp_size"] == 2
    assert "fusion" not in engines.rollout.clients[0].report()  # of operators that are recorded
    assert count_mismatches(engines, seed=30) == 0


def test_no_token_of_a_prompt_differs(engines):
    prompts = [request.prompt_ids for request in make_requests(8, seed=33)]
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    answers = ask_of_prompts(engines, prompts, temperature=0.7)
    expected = engines.trainer.log_probs(prompts, [1] * len(prompts), 0.7)
    for answer, theirs in zip(answers, expected, strict=True):
        assert torch.equal(of_prompt(answer), theirs)


def test_its_ranks_meet_where_nobody_else_comes(engines):
    processes = engine_processes(engines.rollout.servers[0])
    assert {"scheduler_TP0", "scheduler_TP1"} <= processes.keys()
    assert listening_addresses(processes.values()) == {"127.0.0.1"}


class Rounded(RowParallel):
    """Rounds every rank's part before the sum, as an all-reduce in bfloat16 does."""

    def sum(self, partials):
        return super().sum([partial.bfloat16().float() for partial in partials])


def test_a_trainer_that_rounds_the_parts_of_a_sum_differs(engines, microscope, monkeypatch):
    cut = [
        module
        for module in engines.trainer.policy.module.modules()
        if isinstance(module, AlignedLinear) and module.row_parallel.blocks > 1
    ]
    assert len(cut) == 4
    for module in cut:
        monkeypatch.setattr(module, "row_parallel", Rounded(module.row_parallel.blocks))
    assert count_mismatches(engines, seed=31) > 0
    site = ("layers.0.self_attn.o_proj", "row_parallel_linear", 0)
    assert microscope.look()["source"]["site"] == site


class LastRankGetsAnotherBit:
    """A client whose pushes give the last rank one weight that differs, in its part of a tensor.

    By default the first tensor of each bucket, in the last bit.
    """

    def __init__(self, client, wanted=None, bit=0):
        self.client, self.wanted, self.bit = client, wanted, bit

    def __getattr__(self, name):
        return getattr(self.client, name)

    def post(self, path, body, num_bytes=0):
        if payloads := body.get("serialized_named_tensors"):
            bucket = pickle.loads(base64.b64decode(payloads[-1]))
            rows = [row for row in bucket["metadata"] if self.wanted in (None, row.name)]
            if rows:
                data = bucket["flattened_tensor"].clone().share_memory_()
                changed = data[rows[0].start_idx : rows[0].end_idx]
                changed.view(torch.int32)[-7] ^= 1 << self.bit
                bucket["flattened_tensor"] = data
            payloads = [*payloads[:-1], base64.b64encode(ForkingPickler.dumps(bucket)).decode()]
            body = {**body, "serialized_named_tensors": payloads}
        return self.client.post(path, body, num_bytes)


def push_badly(engines, **how):
    buckets = engines.trainer.policy.weight_buckets(1 << 20)
    clients = [LastRankGetsAnotherBit(client, **how) for client in engines.rollout.clients]
    engines.weight_version = next(versions)
    with pytest.raises(WeightSyncError, match=r"weights=ranks differ: \['\w{16}', '\w{16}'\]"):
        push_weights(buckets, clients, SharedMemoryTransport(), engines.weight_version)


def test_a_rank_that_got_other_weights_stops_the_run(engines):
    push_badly(engines)
    engines.push_weights(next(versions))
    assert count_mismatches(engines, seed=32) == 0


def test_changes_are_put_into_what_both_ranks_hold_shards_of(engines):
    sync = replace(engines.config.sync, sparse_weight_sync=True)
    config = replace(engines.config, sync=sync)
    outlet = WeightOutlet(config, engines.contract, engines.trainer.policy)
    for number in range(2):
        nudge(engines.trainer)
        engines.weight_version = next(versions)
        outlet.push(engines.rollout.clients, engines.weight_version)
        assert outlet.push_metrics.get("push/sent_share", 1.0) < 0.05 or number == 0
    assert count_mismatches(engines, seed=34) == 0


def test_between_both_ranks_and_the_trainer_no_row_differs(microscope):
    result = microscope.look()
    assert result["num_mismatched_tokens"] == 0 < result["num_compared_tokens"]
    assert result["source"] is None and result["only_in_one"] == []
    assert result["rollout_ranks"] == 2
    sites = {(site["site"][0], site["site"][1]): site for site in result["sites"]}
    assert all(s["inputs_differ"] == s["outputs_differ"] == 0 < s["rows"] for s in sites.values())
    assert {("embed_tokens", "embedding"), ("norm", "rms_norm"), ("lm_head", "linear")} < set(sites)
    rows = {site["rows"] for name, site in sites.items() if name[0] != "lm_head"}
    assert len(rows) == 1  # every operator has computed every token, on either rank


def test_a_weight_that_one_rank_did_not_get_is_named_and_proven(engines, microscope):
    module = "layers.1.mlp.up_proj"
    push_badly(engines, wanted=f"model.{module}.weight", bit=20)
    result = microscope.look()
    engines.push_weights(next(versions))
    source = result["source"]
    assert (source["cause"], source["site"]) == ("operator", (module, "linear", 0))
    assert source["ranks"] == (1,)
    assert result["proof"]["verdict"] == "other weights"
    assert result["proof"]["difference"]["different"] == 1
    assert "rank 1 alone of the rollout's 2 tensor-parallel ranks" in told(result)
