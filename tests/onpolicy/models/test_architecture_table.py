from tests.support.architecture_table import CELLS, PAGE, page, read


def test_the_page_is_what_the_record_renders():
    assert PAGE.read_text() == page(read())


def test_every_cell_of_the_page_was_run_and_no_other_is_in_the_record():
    written = {(architecture, column) for architecture, cells in read().items() for column in cells}
    assert written == set(CELLS)


OPEN: set[tuple[str, str]] = set()
"""Faults of the record, all of them."""


def test_no_token_of_the_record_differs_but_where_a_fault_is_open():
    faults = {
        (architecture, column)
        for architecture, cells in read().items()
        for column, cell in cells.items()
        if cell.get("mismatched", 0) or "failed" in cell
    }
    assert faults == OPEN


def test_what_differs_or_fails_is_shown_as_such():
    shown = page({"qwen3": {
        "float32": {"compared": 144, "mismatched": 3}, "bfloat16": {"failed": "why"},
        "Megatron": {"refused": "because"},
    }})  # fmt: skip
    assert "| Qwen3 (`qwen3`) | **3 of 144** | **fails** | not run | refused |" in shown
    assert "- `qwen3` in Megatron: because" in shown
