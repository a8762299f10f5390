"""What is recorded of SGLang's own modules, by modules of their names."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onpolicy.explain.taps.points import kept_rows
from onpolicy.explain.taps.recorder import CHOSEN_EXPERTS, Recorder
from sglang_patches import stock_taps

EXPERTS = "layers.0.mlp.experts"


class LinearBase(nn.Module):
    reduce_results = True

    def forward(self, x):
        return x + 1, None


class RowParallelLinear(LinearBase):
    reduce_results = False


class FusedMoE(nn.Module):
    reduce_results = False

    def forward(self, x, choice):
        return x * 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        mlp = nn.ModuleDict({
            "gate": LinearBase(), "down_proj": RowParallelLinear(), "experts": FusedMoE()
        })  # fmt: skip
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": mlp})])})
        self.logits_processor = SimpleNamespace(_compute_lm_head=None)

    def forward(self, x):
        mlp = self.model["layers"][0]["mlp"]
        mlp["gate"](x)
        mlp["down_proj"](x)
        chosen, weights = torch.tensor([[5, 2], [0, 1]]), torch.tensor([[0.6, 0.4], [0.7, 0.3]])
        mlp["experts"](x, SimpleNamespace(topk_ids=chosen, topk_weights=weights))


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.fixture
def recorded(monkeypatch):
    """Rows by points of a model on two ranks that hold the same, so that a sum is twice a part."""
    monkeypatch.setattr(stock_taps, "summed", lambda part: 2 * part)

    def record(blocks=1, keeps_rows=True):
        model, recorder = Model(), Recorder(keeps_rows=keeps_rows)
        stock_taps.watch(model, recorder, blocks)
        recorder.open(torch.tensor([7, 8]), torch.tensor([1]))
        model(X)
        calls = recorder.close()
        rows = {point: kept.rows[0].tolist() for point, kept in kept_rows([calls]).items()}
        return [call.site for call in calls], rows

    return record


def test_a_linear_whose_sum_is_made_later_is_recorded_with_its_sum(recorded):
    _, rows = recorded()
    assert rows[("layers.0.mlp.gate", "linear", 0), "made"] == (X + 1).tolist()
    assert rows[("layers.0.mlp.down_proj", "linear", 0), "made"] == (2 * (X + 1)).tolist()
    assert rows[("layers.0.mlp.down_proj", "linear", 0), "given"] == X.tolist()


def test_linears_have_the_trainers_names_where_it_sums_in_blocks(recorded):
    sites, _ = recorded(blocks=2)
    assert ("layers.0.mlp.gate", "linear", 0) in sites
    assert ("layers.0.mlp.down_proj", "row_parallel_linear", 0) in sites


def test_experts_are_one_operator_and_their_choice_in_order_where_rows_are_kept(recorded):
    _, rows = recorded()
    assert rows[(EXPERTS, CHOSEN_EXPERTS, 0), "made"] == [[2, 5], [0, 1]]
    assert rows[(EXPERTS, "routing", 0), "made"] == torch.tensor([[0.4, 0.6], [0.7, 0.3]]).tolist()
    assert rows[(EXPERTS, "experts", 0), "given"] == X.tolist()
    assert rows[(EXPERTS, "experts", 0), "made"] == (6 * X).tolist()
    assert not any(site[0] == EXPERTS for site in recorded(keeps_rows=False)[0])
