from tests.support.architecture_table import COLUMNS, PAGE, page, read
from tests.support.tiny import ALL_ARCHITECTURES


def test_the_page_is_what_the_record_renders():
    assert PAGE.read_text() == page(read())


def test_the_record_is_of_architectures_and_columns_that_there_are():
    for architecture, cells in read().items():
        assert architecture in ALL_ARCHITECTURES and cells.keys() <= COLUMNS.keys()


def test_no_token_of_the_record_differs():
    cells = [cell for row in read().values() for cell in row.values()]
    assert all(cell.get("mismatched", 0) == 0 and "failed" not in cell for cell in cells)


def test_what_differs_or_fails_is_shown_as_such():
    shown = page({"qwen3": {
        "float32": {"compared": 144, "mismatched": 3}, "bfloat16": {"failed": "why"},
        "Megatron": {"refused": "because"},
    }})  # fmt: skip
    assert "| Qwen3 (`qwen3`) | **3 of 144** | **fails** | not run | refused |" in shown
    assert "- Qwen3 (`qwen3`), Megatron: because" in shown
