"""What operators contribute adds up to the mismatch, and is what replacing one of them does."""

import pytest
import torch

from onpolicy.errors import EngineError
from onpolicy.explain.contributions import LOGITS, contributions
from onpolicy.explain.exact import ExactModel, ExactOperators
from onpolicy.explain.shares import kind_of
from onpolicy.explain.taps.points import Forced, Kept, gathered, in_both, kept_rows
from onpolicy.explain.taps.policy import packed_keys
from onpolicy.explain.taps.recorder import Recorder
from onpolicy.models.policy import PackedTokens
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.stock import StockOperators
from tests.onpolicy.models.test_policy import load_policy, random_sequences
from tests.support import faults
from tests.support.recorded_policies import TEMPERATURE, record_rollout, recording, replace_in

SEQUENCES = random_sequences([66, 9, 20])
DOWN, UP = "layers.1.mlp.down_proj", "layers.0.mlp.up_proj"
DOWN_MADE = ((DOWN, "linear", 0), "made")
UP_MADE = ((UP, "linear", 0), "made")


class Engines:
    """A trainer's and a rollout's policy in this process; tests break the rollout's."""

    def __init__(self, path, ours=CpuOperators, dtype=torch.float32):
        self.trainer = load_policy(path, ours(1), dtype)
        self.rollout = load_policy(path, dtype=dtype)
        self.exact = ExactModel(load_policy(path, ExactOperators(1), dtype).double())

    def scored(self, recorder):
        """(passes, log-probabilities) of the trainer."""
        batch = PackedTokens.after_prompts(SEQUENCES, [1] * len(SEQUENCES), TEMPERATURE)
        with recording(self.trainer, recorder) as passes, torch.no_grad():
            scores = self.trainer(batch)
        return passes, scores.log_probs

    def rows(self):
        """(the rollout's, the trainer's, own) of `contributions`."""
        recorder, passes = Recorder(keeps_rows=True), []
        record_rollout(self.rollout, CpuOperators(1), SEQUENCES, recorder, passes=passes)
        ours, _ = self.scored(Recorder(keeps_rows=True))
        theirs, ours = in_both(kept_rows(passes), kept_rows(ours))
        forced = Forced(recorded=theirs)
        self.scored(forced)
        return theirs, ours, gathered(forced.apart)

    def contributions(self, sequence=SEQUENCES[0], rows=None):
        batch = PackedTokens.after_prompts([sequence], [1], TEMPERATURE)
        return contributions(self.exact, batch, *(rows or self.rows()))


@pytest.fixture
def engines(checkpoint):
    return Engines(checkpoint)


def scaled(right):
    """An operator whose every number is a thousandth too large."""
    return lambda *args: right(*args) * 1.001


def break_in(monkeypatch, policy, fault, *places):
    for module in places:
        name = "linear" if module == UP else "row_parallel_linear"
        replace_in(monkeypatch, policy, module, name, fault)


def total(found, column):
    return sum(getattr(point, column) for point in found.points.values())


def test_between_aligned_engines_everything_contributes_exactly_0(engines):
    found = engines.contributions()
    assert found.kl == found.shift == 0 < found.tokens == len(SEQUENCES[0]) - 1
    assert len(found.points) > 50
    for point in found.points.values():
        assert point.kl == point.own_kl == point.shift == point.own_shift == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_stock_and_aligned_engines_contributions_add_up(checkpoint, dtype):
    engines = Engines(checkpoint, StockOperators, dtype)
    rows = engines.rows()
    for sequence in SEQUENCES:
        found = engines.contributions(sequence, rows)
        assert found.kl > 0 and total(found, "kl") == pytest.approx(found.kl, rel=1e-3)
        assert total(found, "shift") == pytest.approx(found.shift, rel=1e-3, abs=1e-5)


def test_one_broken_operator_has_nearly_all_of_it(engines, monkeypatch):
    break_in(monkeypatch, engines.rollout, faults.rounded_in_between, DOWN)
    found = engines.contributions()
    assert found.points[DOWN_MADE].own_kl == pytest.approx(found.kl, rel=0.01)
    assert total(found, "kl") == pytest.approx(found.kl, rel=0.01)
    others = {point: c for point, c in found.points.items() if point != DOWN_MADE}
    assert all(c.own_kl == c.own_shift == 0 for c in others.values())


def test_a_contribution_is_what_replacing_the_trainers_operator_alone_does(engines, monkeypatch):
    break_in(monkeypatch, engines.rollout, scaled, DOWN, UP)
    found, (_, before) = engines.contributions(), engines.scored(Recorder())
    tokens = len(SEQUENCES[0]) - 1
    for module, point in ((DOWN, DOWN_MADE), (UP, UP_MADE)):
        with monkeypatch.context() as swapped:
            break_in(swapped, engines.trainer, scaled, module)
            _, after = engines.scored(Recorder())
        change = float((after - before)[:tokens].double().sum())
        assert abs(change) > 1e-3
        assert found.points[point].own_shift == pytest.approx(change, rel=0.03)


@pytest.mark.parametrize("number", [0, 2], ids=["recorded", "own"])
def test_rows_of_another_token_are_not_the_operators(engines, monkeypatch, number):
    """The control of the two tests before: each row must be compared with the same one."""
    break_in(monkeypatch, engines.rollout, scaled, DOWN)
    rows = engines.rows()
    whole = engines.contributions(rows=rows)
    right = rows[number][DOWN_MADE]
    rows[number][DOWN_MADE] = Kept(right.keys, [part.roll(1, 0) for part in right.rows])
    found = engines.contributions(rows=rows).points[DOWN_MADE]
    assert whole.points[DOWN_MADE].own_kl == pytest.approx(whole.kl, rel=0.01)
    assert abs(found.kl - whole.kl) > whole.kl or abs(found.own_kl - whole.kl) > 0.5 * whole.kl


def test_kl_is_of_the_whole_vocabulary(engines, monkeypatch):
    break_in(monkeypatch, engines.rollout, scaled, DOWN, UP)
    theirs, ours, own = engines.rows()
    found = engines.contributions(rows=(theirs, ours, own))
    batch = PackedTokens.after_prompts([SEQUENCES[0]], [1], TEMPERATURE)
    both = []
    for side in (theirs, ours):
        where, is_there = side[LOGITS].find(packed_keys(batch.tokens, batch.layout)[batch.rows])
        assert is_there.all()
        both.append(torch.log_softmax(side[LOGITS].rows[0][where].double() / TEMPERATURE, -1))
    kl = torch.nn.functional.kl_div(both[1], both[0], log_target=True, reduction="sum")
    assert found.kl == pytest.approx(float(kl), rel=1e-6)
    assert found.shift == pytest.approx(
        float((both[0] - both[1]).gather(1, batch.targets[:, None]).sum()), rel=1e-6
    )


def test_every_point_has_a_kind(engines):
    kinds = {kind_of(point) for point in engines.contributions().points}
    assert kinds == {"between operators", "linear", "attention", "norm", "rotary", "activation"}


def test_a_token_without_logits_is_refused(engines):
    theirs, ours, own = engines.rows()
    right = theirs[LOGITS]
    theirs[LOGITS] = Kept(right.keys[5:], [rows[5:] for rows in right.rows])
    with pytest.raises(EngineError, match=r"no logits were recorded of [1-5] of \d+ tokens"):
        for sequence in SEQUENCES:
            engines.contributions(sequence, (theirs, ours, own))
