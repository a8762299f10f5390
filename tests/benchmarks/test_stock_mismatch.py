"""The record of mismatch in chats: that of its page and picture, and what its statistics say."""

import json
import math
from pathlib import Path

import pytest

import benchmarks
from benchmarks.stock_mismatch import (
    ANSWER,
    CONTEXT,
    CONTEXTS,
    POSITIONS,
    PROBABILITIES,
    TEMPERATURES,
    Token,
    draw,
    page_tables,
    statistics,
    tables,
)

ROOT = Path(benchmarks.__path__[0])
RECORD = ROOT / "results" / "stock_mismatch.json"
PAGE = ROOT.parent / "docs" / "trained_weights.md"


def test_the_page_shows_the_record_which_has_every_range(tmp_path):
    record = json.loads(RECORD.read_text())
    assert page_tables(record) in PAGE.read_text()
    kinds = [each[kind] for each in (record, record["float16"]) for kind in ("stock", "aligned")]
    for kind in kinds:
        for name, ends in (
            ("temperature", TEMPERATURES),
            ("context", CONTEXTS),
            ("position", POSITIONS),
            ("probability", PROBABILITIES),
        ):
            assert list(kind[name]) == [str(end) for end in ends]
        names = ("context", "position", "probability")
        inside = {sum(of["tokens"] for of in kind[name].values()) for name in names}
        assert len(inside) == 1
    aligned = (each[name].values() for each in kinds[1::2] for name in ("temperature", *names))
    for ranges in aligned:
        assert all(found["mismatched"] == found["largest"] == 0 for found in ranges)
    draw(record, tmp_path / "mismatch.png")
    assert (tmp_path / "mismatch.png").stat().st_size


def test_statistics_of_two_tokens():
    far, near = math.log(2.5), math.log(1.5)
    tokens = [Token(1.0, 10, 1, -1.0, far - 1.0), Token(1.0, 20, 2, -2.0, -near - 2.0)]
    found = statistics([*tokens, Token(1.0, 30, 3, 0.0, 0.0)])
    assert (found["tokens"], found["mismatched"]) == (3, 2)
    assert found["largest"] == pytest.approx(far)
    assert found["mean"] == pytest.approx((far + near) / 3)
    assert found["k3"] == pytest.approx((2.5 - far - 1 + 1 / 1.5 + near - 1) / 3)
    assert found["beyond_1.28"] == pytest.approx(2 / 3)
    assert found["beyond_2.0"] == pytest.approx(1 / 3)


def test_a_token_is_in_one_range_of_each_kind():
    tokens = [
        Token(1.0, context, position, math.log(p), math.log(p))
        for context, position, p in ((1, 1, 1.0), (256, ANSWER, 0.001), (CONTEXT, 2, 0.5))
    ]
    found = tables([*tokens, Token(0.3, 1, 1, 0.0, 0.0), Token(0.7, 1, 1, 0.0, 0.0)])
    assert {end: each["tokens"] for end, each in found["context"].items()} == {"1024": 2, "4096": 1}
    assert {end: each["tokens"] for end, each in found["position"].items()} == {
        "1": 1, "4": 1, "96": 1
    }  # fmt: skip
    assert set(found["probability"]) == {"0.01", "0.5", "1.0"}
