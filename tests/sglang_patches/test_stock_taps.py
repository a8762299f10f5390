"""What is recorded of SGLang's own modules, by modules of their names."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onpolicy.explain.taps.recorder import Recorder
from onpolicy.explain.taps.rows import digest
from sglang_patches import stock_taps


class LinearBase(nn.Module):
    reduce_results = True

    def forward(self, x):
        return x + 1, None


class RowParallelLinear(LinearBase):
    reduce_results = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        mlp = nn.ModuleDict({"gate": LinearBase(), "down_proj": RowParallelLinear()})
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": mlp})])})
        self.logits_processor = SimpleNamespace(_compute_lm_head=None)

    def forward(self, x):
        mlp = self.model["layers"][0]["mlp"]
        mlp["gate"](x)
        mlp["down_proj"](x)


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.fixture
def recorded(monkeypatch):
    """Calls by sites of a model on two ranks that hold the same, so that a sum is twice a part."""
    monkeypatch.setattr(stock_taps, "summed", lambda part: 2 * part)

    def record(blocks=1):
        model, recorder = Model(), Recorder()
        stock_taps.watch(model, recorder, blocks)
        recorder.open(torch.tensor([7, 8]), torch.tensor([1]))
        model(X)
        return {call.site: call for call in recorder.close()}

    return record


def test_a_linear_whose_sum_is_made_later_is_recorded_with_its_sum(recorded):
    calls = recorded()
    gate, down = (calls[f"layers.0.mlp.{name}", "linear", 0] for name in ("gate", "down_proj"))
    assert torch.equal(gate.outputs, digest(X + 1))
    assert torch.equal(down.outputs, digest(2 * (X + 1)))
    assert torch.equal(down.inputs, digest(X))


def test_linears_have_the_trainers_names_where_it_sums_in_blocks(recorded):
    calls = recorded(blocks=2)
    assert [*calls] == [
        ("layers.0.mlp.gate", "linear", 0), ("layers.0.mlp.down_proj", "row_parallel_linear", 0),
    ]  # fmt: skip
