"""The table of claims on trained weights is that of its record, whose commands are the script's."""

import asyncio
from types import SimpleNamespace

from benchmarks.trained_weights import (
    CLAIMS,
    MODELS,
    PAGE,
    ROOT,
    WORK,
    Calculated,
    command,
    read,
    shown,
    table,
)


def test_the_page_shows_the_record():
    assert table(read()) in PAGE.read_text()


def test_every_row_came_from_its_command_and_no_token_differs():
    for model, rows in read().items():
        assert model in MODELS and set(rows) <= set(CLAIMS)
        for claim, row in rows.items():
            due = " ".join(command(model, claim, WORK / "row")).replace(f"{ROOT}/", "")
            assert row["command"] == f"onpolicy {due}"
            assert "refused" in row or row["compared"] > 0 == row["mismatched"]
            assert "refused" in row or row["exit_code"] == row["drawn_otherwise"] == 0


def test_a_cell_says_what_came():
    assert shown(None) == "not run"
    assert shown({"refused": "why", "seconds": 3}) == "refused"
    assert shown({"failed": "why", "compared": 0, "mismatched": 0, "seconds": 3}) == "**fails**"
    assert shown({"compared": 1440, "mismatched": 2, "seconds": 3}) == "**2 of 1,440**, 3 s"


def test_the_calculator_is_read_after_each_of_three_actions():
    episode = Calculated()
    text = "12 + 5 = 17\n36 + 7 ="
    assert episode.reset(SimpleNamespace(text=text, label="43")) is None
    for is_last in (False, False, True):
        said, reward, is_done = asyncio.run(episode.step("It is 43"))
        assert said == "\nThe calculator says 36 + 7 = 43.\n"
        assert (reward, is_done) == (1.0, is_last)
