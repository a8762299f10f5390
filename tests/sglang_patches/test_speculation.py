"""Drafts that are verified: the same tokens and log-probabilities, in fewer passes."""

import dataclasses
import os
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch

from onpolicy.errors import ContractError
from onpolicy.rollout.client import _payload
from sglang_patches import registry
from sglang_patches.speculation import (
    SLOTS_TARGET,
    TABLES_TARGET,
    _no_trees,
    _room_in_tables,
    _worker,
    assign_slots,
    install,
    longest_chains,
    of_rows,
    taken,
)
from tests.support.after_import import after_import
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.flash_attention_backend import attributes_of_backend
from tests.support.tiny_contract import CONTRACT
from tests.support.train_runs import ROOT

NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "12")

TAKES_ALL = """
from pathlib import Path
from sglang_patches import speculation
right = speculation.num_taken
def either(draft, drawn):
    taken = right(draft, drawn)
    return taken.new_full(taken.shape, drawn.shape[1]) if Path({file!r}).exists() else taken
speculation.num_taken = either
"""
"""A worker that takes every drafted token, while a file is there."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return tmp_path_factory.mktemp("broken") / "broken"


@pytest.fixture(scope="module")
def drafting(checkpoint, tmp_path_factory, broken):
    code = TAKES_ALL.format(file=str(broken))
    customize = after_import(
        "sglang_patches.speculation", code, "'sglang_patches.serve' in sys.orig_argv"
    )
    (broken.parent / "sitecustomize.py").write_text(customize)
    paths = [str(broken.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    pair = make_engines(checkpoint, tmp_path_factory.mktemp("drafting"), sglang_args=NGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        with running(pair, anew=True):
            yield pair


def group(temperature, count=6, **changes):
    """Samples of one prompt, of which one is asked for twice, with the entropy of each token."""
    (request, *_) = make_requests(1, seed=3, max_new_tokens=60, temperature=temperature)
    params = dataclasses.replace(request.params, **{"return_entropy": True, **changes})
    seeds = [*range(count), 0]
    return [dataclasses.replace(request, params=params, sampling_seed=seed) for seed in seeds]


def answers(completions):
    return [(c.response_ids, c.rollout_log_probs, c.entropy, c.finish_reason) for c in completions]


def said(pair, request):
    """What a server answers beside the tokens."""
    (client,) = pair.rollout.clients
    answer = requests.post(f"{client.url}/generate", json=_payload(request), headers=client.headers)
    return answer.json()["meta_info"]


@pytest.mark.engine
def test_engines_tell_entropies_from_the_first_request_on_that_asks(drafting):
    """Those of the tokens that were taken, however many a pass took."""
    (plain, *_), (asked, *_) = group(1.0, return_entropy=False), group(1.0)
    assert "entropy" not in said(drafting, plain)
    first, again = said(drafting, asked), said(drafting, asked)
    assert len(first["entropy"]) == 60 and again["entropy"] == first["entropy"]
    assert again["spec_num_correct_drafts"] > 30


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_samples_and_log_probabilities_are_the_bits_of_an_engine_without_drafts(
    engines, drafting, temperature
):
    """Whatever is proposed: nothing known, what others answered, or the very answer."""
    requests = group(temperature)
    plain = engines.generate(requests)
    assert {c.drafts for c in plain} == {(0, 0)}
    for _ in range(2):
        drafted = drafting.generate(requests)
        assert answers(drafted) == answers(plain)
        proposed, taken = map(sum, zip(*(c.drafts for c in drafted), strict=True))
    assert proposed > taken > 0.5 * proposed, "answers are known by then"


@pytest.mark.engine
def test_an_answer_ends_where_it_ends_without_drafts(engines, drafting):
    (plain, *_) = engines.generate(group(1.0, ignore_eos=True))
    stops = group(1.0, stop_token_ids=(plain.response_ids[20],), ignore_eos=False)
    short = group(1.0, max_new_tokens=7)
    for asked in (stops, short):
        assert answers(drafting.generate(asked)) == answers(engines.generate(asked))


@pytest.mark.engine
def test_answers_at_the_end_of_the_context_leave_no_slot_behind(engines, drafting):
    """An engine that misses one ends once it has nothing to do."""
    prompt = [5 + i % 97 for i in range(drafting.hf_config.max_position_embeddings - 16)]
    short = group(1.0, max_new_tokens=16)
    requests = [dataclasses.replace(request, prompt_ids=prompt) for request in short]
    restarts_left = drafting.rollout._restarts_left
    assert answers(drafting.generate(requests)) == answers(engines.generate(requests))
    time.sleep(1)
    drafting.generate(short)
    assert drafting.rollout._restarts_left == restarts_left


@pytest.mark.engine
def test_an_engine_that_takes_what_was_not_drawn_is_found(engines, drafting, broken):
    requests = group(1.0)
    broken.touch()
    try:
        assert answers(drafting.generate(requests)) != answers(engines.generate(requests))
    finally:
        broken.unlink()


@pytest.mark.engine
@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.5), ("min_p", 0.1)])
def test_requests_whose_answers_could_not_say_what_was_left_are_refused(drafting, name, value):
    with pytest.raises(ContractError, match=f"{name}={value}: not on a server"):
        drafting.generate(group(1.0, **{name: value}))


def test_other_sources_of_drafts_are_refused_by_name():
    algorithm = SimpleNamespace(is_ngram=lambda: False, name="EAGLE")
    with pytest.raises(ContractError, match=r"--speculative-algorithm EAGLE: .*NGRAM"):
        _worker(None, algorithm, None)


def test_the_chain_is_the_longest_path_of_a_tree_and_goes_on_with_its_last_token():
    tokens = np.array([[7, 1, 2, 3, 4], [7, 5, 6, 0, 0]])
    paths = np.stack([np.eye(5, dtype=np.int64)] * 2)
    paths[:, :, 0] = 1  # every node is below its root
    paths[0, 3, 1] = 1
    paths[0, 4, [1, 3]] = 1  # 7 -> 1 -> 3 -> 4
    chains = longest_chains(tokens.flatten(), paths.flatten(), 5)
    assert chains.tolist() == [[7, 1, 3, 4, 4], [7, 5, 5, 5, 5]]


def test_of_every_pass_that_is_told_which_was_taken():
    assert taken([1, 2, 3, 4, 5, 6], [2, 3]) == [[1, 2], [4, 5, 6]]
    assert taken([], []) == []


def test_slots_are_written_where_each_requests_tokens_go_on():
    table = torch.zeros(4, 9, dtype=torch.int32)
    starts, ends = torch.tensor([2, 0, 5]), torch.tensor([4, 0, 8])
    assign_slots(torch.tensor([3, 1, 0]), table, starts, ends, torch.arange(10, 15), 3)
    want = torch.zeros_like(table)
    want[3, 2:4], want[0, 5:8] = torch.tensor([10, 11]), torch.tensor([12, 13, 14])
    assert torch.equal(table, want)
    with pytest.raises(RuntimeError):
        assign_slots(torch.tensor([2]), table, torch.tensor([9]), torch.tensor([10]), starts[:1], 1)


def test_page_tables_of_graphs_have_room_for_drafts_beyond_the_context():
    """They are as wide as a request's row of slots; SGLang makes them as wide as the context."""
    rows = torch.zeros(2, 128 + 24, dtype=torch.int32)
    for page_size, pages in ((1, 152), (16, 10)):
        backend = SimpleNamespace(
            req_to_token=rows,
            page_size=page_size,
            max_context_len=128,
            max_num_pages=128 // page_size,
        )
        _room_in_tables(None, backend)
        assert (backend.max_context_len, backend.max_num_pages) == (152, pages)


def test_the_installed_sglang_makes_page_tables_as_wide_as_its_backend_says():
    assert {"max_context_len", "max_num_pages", "req_to_token"} <= attributes_of_backend()


@pytest.mark.parametrize(
    "names",
    [
        "sglang.kernels.ops.speculative.reconstruct_tree, reconstruct_indices_from_tree_mask_func",
        "sgl_kernel.speculative, reconstruct_indices_from_tree_mask",  # SGLang 0.5.21 and 0.5.22
    ],
)
def test_what_a_worker_of_any_version_imports_for_trees_is_there_on_a_cpu(names, monkeypatch):
    module, name = names.split(", ")
    with pytest.raises(ImportError):
        exec(f"from {module} import {name}")
    for stub in _no_trees().items():
        monkeypatch.setitem(sys.modules, *stub)
    exec(f"from {module} import {name}")


def test_on_a_gpu_the_backend_is_told(monkeypatch):
    asked = []
    monkeypatch.setattr(registry, "hook", lambda target, *_: asked.append(target))
    install(dataclasses.replace(CONTRACT, device="cuda"))
    assert TABLES_TARGET in asked and SLOTS_TARGET not in asked


def test_rows_have_the_settings_of_their_request():
    names = ("temperatures", "sampling_seed", "top_ks", "top_ps", "min_ps")
    info = SimpleNamespace(**{name: torch.tensor([[1], [2]]) for name in names}, is_any_greedy=True)
    rows = of_rows(info, 3)
    assert all(getattr(rows, name).flatten().tolist() == [1, 1, 1, 2, 2, 2] for name in names)
    assert rows.is_any_greedy and len(info.temperatures) == 2
