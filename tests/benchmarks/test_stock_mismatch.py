"""The record of mismatch in chats is that of its page, and has every token in one range of each kind."""

import json
from pathlib import Path

import benchmarks

ROOT = Path(benchmarks.__path__[0])
RECORD = json.loads((ROOT / "results" / "stock_mismatch.json").read_text())
PAGE = ROOT.parent / "docs" / "trained_weights.md"
RANGES = ("context", "position", "probability")


def page_rows(name):
    """The page's rows of stock engines by temperature or by a token's probability."""
    before = "0"
    for end, of in RECORD["stock"][name].items():
        is_range = name == "probability"
        title = (
            f"{before} < probability <= {end}" if is_range else f"{name} {end} (up to 2,048 tokens)"
        )
        numbers = [f"{of['tokens']:,}", *(f"{of[key]:.2g}" for key in ("k3", "mean", "largest"))]
        shares = [f"{of[f'beyond_{far}']:.2%}" for far in ("1.28", "2.0")]
        yield f"| {' | '.join([title, *numbers, *shares])} |\n"
        before = end


def test_the_page_shows_the_record():
    for name in ("temperature", "probability"):
        assert "".join(page_rows(name)) in PAGE.read_text()


def test_every_token_is_in_one_range_of_each_kind_and_none_of_aligned_engines_differs():
    for kind in ("stock", "aligned"):
        inside = {sum(of["tokens"] for of in RECORD[kind][name].values()) for name in RANGES}
        assert len(inside) == 1
    for ranges in (RECORD["aligned"][name].values() for name in ("temperature", *RANGES)):
        assert all(found["mismatched"] == found["largest"] == 0 for found in ranges)
