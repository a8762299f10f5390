"""What is recorded, and that recording leaves everything as it was."""

import torch
import torch.nn.functional as F
from torch import nn

from onpolicy.explain.taps.evidence import Scope
from onpolicy.explain.taps.recorder import INPUTS, Recorder, Recording, read_calls, write_calls
from onpolicy.models.policy import PackedTokens
from onpolicy.ops import Operators
from tests.onpolicy.models.test_policy import load_policy, random_sequences
from tests.support.recorded_policies import recording
from tests.support.tiny import make_checkpoint

SEQUENCES = random_sequences([20, 7])


def scored(policy):
    with torch.no_grad():
        return policy(PackedTokens.after_prompts(SEQUENCES, [1, 1], 1.0))[0]


def test_recording_changes_no_bit_and_leaves_nothing_behind(checkpoint):
    policy = load_policy(checkpoint)
    before = scored(policy)
    held = [getattr(module, "operators", None) for module in policy.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in policy.modules()]
    with recording(policy, Recorder()) as passes:
        assert torch.equal(scored(policy), before)
    assert len(passes) == 1
    assert torch.equal(scored(policy), before) and len(passes) == 1
    after = [getattr(module, "operators", None) for module in policy.modules()]
    assert all(a is b for a, b in zip(held, after, strict=True))
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in policy.modules()]


def test_passes_come_back_from_their_files(checkpoint, tmp_path):
    with recording(load_policy(checkpoint), Recorder()) as passes:
        pass
    policy = load_policy(checkpoint)
    with recording(policy, Recorder()) as passes:
        scored(policy)
    write_calls(passes[0], tmp_path / "00000001.pass")
    ours, theirs = Recording.of(passes), Recording.of(read_calls(tmp_path))
    assert list(ours) == list(theirs)
    for site, by_rank in ours.items():
        rows, read = by_rank[0], theirs[site][0]
        assert (rows.outputs == read.outputs).all() and rows.shapes == read.shapes
        assert (rows.find(rows.keys) >= 0).all() and (rows.find(rows.keys + 1) < 0).all()
    assert [p.name for p in tmp_path.iterdir()] == ["00000001.pass"]


def test_rows_of_a_shared_prefix_are_one(tmp_path):
    path = make_checkpoint(tmp_path / "model", "qwen3-moe")
    policy, sequence = load_policy(path), SEQUENCES[0]
    with recording(policy, Recorder()) as passes, torch.no_grad():
        policy(PackedTokens.after_prompts([sequence, [*sequence[:12], 5, 6]], [1, 1], 1.0))
    sites = Recording.of(passes).items()
    counts = {len(by_rank[0].keys) for site, by_rank in sites if site[0] != "lm_head"}
    assert counts == {len(sequence) + 2}


def test_a_call_inside_an_operator_is_not_recorded():
    """Of another number of rows, as a tile of a product in a router's block."""
    recorder, x, weight = Recorder(), torch.randn(20, 8), torch.randn(4, 8)

    def in_tiles(x, weight):
        return torch.cat([recorder.run("linear", F.linear, part, weight) for part in x.split(7)])

    block = nn.Identity()
    recorder.scoped(block, lambda *_: Scope(module="mlp"))
    block.forward = lambda x: recorder.run("linear", in_tiles, x, weight)
    recorder.open(torch.arange(20), torch.arange(1))
    block(x)
    assert [(call.site, len(call.keys)) for call in recorder.close()] == [
        (("mlp", "linear", 0), 20)
    ]


def test_every_operator_is_recorded_or_is_part_of_another():
    operators = {name for name in dir(Operators) if not name.startswith("_")}
    # Called inside others that are recorded, or by what follows the logits.
    others = {"partial_linear", "blockwise_linear", "log_softmax", "gather_log_probs", "sample"}
    # Made of those that are recorded; an engine that is recorded does not call them.
    others |= {"add_rms_norm", "norm_rotary", "mix_few"}
    # Those of linears of bytes are recorded themselves: tests/onpolicy/models/test_rounded_inputs.py.
    others |= {"of_rounded"}
    # They read what came before a row, which no digest of the row holds: what reads them is recorded.
    others |= {"causal_conv", "gated_delta"}
    # No part of a forward pass.
    others |= {
        "hold", "whole", "linear_gradients", "grad_logits", "rows_per_chunk", "logits_per_chunk",
        "column_tile", "key_chunk", "run_pieces", "uniform",
    }  # fmt: skip
    assert operators - others == set(INPUTS)
