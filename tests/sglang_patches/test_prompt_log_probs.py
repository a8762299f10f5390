"""The answers about prompts: what SGLang would say, from our operators, in whatever chunks."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logprob_processor import InputLogprobProcessor

from onpolicy.ops.cpu import CpuOperators
from sglang_patches import prompt_log_probs, registry
from tests.support.tiny_contract import CONTRACT

VOCABULARY, HIDDEN = 137, 96


@pytest.fixture
def operators():
    return CpuOperators()


@pytest.fixture
def forward(operators, monkeypatch):
    hooks = {}
    monkeypatch.setattr(
        registry, "hook", lambda target, function, _: hooks.update({target: function})
    )
    prompt_log_probs.install(operators, CONTRACT)
    return lambda **inputs: hooks[prompt_log_probs.TARGET](None, **inputs)


def a_batch(operators):
    """A request that asks for everything, one that asks for nothing, and two that ask for a part."""
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN)
    asked, kept = [70, 0, 40, 30], [70, 1, 40, 30]  # a row that is only sampled from is kept too
    ends = torch.tensor(kept).cumsum(0)
    rows = [row for row in range(int(ends[-1])) if row != 70]
    metadata = SimpleNamespace(
        extend_seq_lens_cpu=kept,
        extend_logprob_pruned_lens_cpu=asked,
        extend_return_top_logprob=True,
        extend_token_ids_logprob=True,
        top_logprobs_nums=[3, 0, 0, 5],
        token_ids_logprobs=[[1, 136], None, None, [0]],
        extend_input_logprob_token_ids_gpu=torch.randint(VOCABULARY, (len(rows),)),
        sample_indices_cpu=(ends - 1).tolist(),
        input_logprob_indices_cpu=rows,
        temperature=torch.ones(len(kept), 1),
    )
    return {
        "pruned_states": torch.randn(int(ends[-1]), HIDDEN),
        "sample_indices": ends - 1,
        "input_logprob_indices": torch.tensor(rows),
        "token_to_seq_idx": [i for i, count in enumerate(kept) for _ in range(count)],
        "lm_head": SimpleNamespace(org_vocab_size=VOCABULARY),
        "get_logits_fn": lambda states, *_, **__: operators.linear(states, weight),
        "logits_metadata": metadata,
    }


def test_they_are_laid_out_as_sglangs_own(operators, forward):
    batch = a_batch(operators)
    ours, sampled = forward(**batch)
    stock, sampled_by_stock = InputLogprobProcessor(VOCABULARY).forward(**batch)
    assert torch.equal(sampled, sampled_by_stock)
    assert ours.token_logprobs.shape == stock.token_logprobs.shape
    assert ours.top_logprobs_idx == stock.top_logprobs_idx
    assert ours.token_ids_logprobs_idx == stock.token_ids_logprobs_idx
    for mine, theirs in (
        (ours.top_logprobs_val, stock.top_logprobs_val),
        (ours.token_ids_logprobs_val, stock.token_ids_logprobs_val),
    ):
        assert [[len(row) for row in rows] for rows in mine] == [
            [len(row) for row in rows] for rows in theirs
        ]


def test_they_are_what_the_trainer_gathers_each_at_its_requests_temperature(operators, forward):
    batch = a_batch(operators)
    metadata, rows = batch["logits_metadata"], batch["input_logprob_indices"]
    metadata.temperature = torch.tensor([[1.0], [1.0], [0.7], [1.3]])
    logits = batch["get_logits_fn"](batch["pruned_states"])[rows]
    temperatures = metadata.temperature[torch.tensor(batch["token_to_seq_idx"])[rows]]
    tokens = metadata.extend_input_logprob_token_ids_gpu
    expected, _ = operators.gather_log_probs(logits, temperatures, tokens)
    assert torch.equal(forward(**batch)[0].token_logprobs, expected)
    others, _ = operators.gather_log_probs(logits, torch.ones_like(temperatures), tokens)
    assert not torch.equal(expected, others)


def test_chunks_change_nothing(operators, forward, monkeypatch):
    batch = a_batch(operators)
    whole, sampled = forward(**batch)
    sizes = []
    project = batch["get_logits_fn"]
    batch["get_logits_fn"] = lambda states, *_, **__: sizes.append(len(states)) or project(states)
    monkeypatch.setattr(CpuOperators, "logits_per_chunk", 1)
    chunked, sampled_in_chunks = forward(**batch)
    assert sizes == [64, 64, 13]
    assert torch.equal(sampled, sampled_in_chunks)
    assert torch.equal(whole.token_logprobs, chunked.token_logprobs)
    for name in ("top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val"):
        assert getattr(whole, name) == getattr(chunked, name)
