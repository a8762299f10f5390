"""Numbers of the pages about GPUs are those of their records, and what no record holds is said."""

import re
from itertools import chain

import pytest
import torch

from benchmarks import gpu_tables
from benchmarks.gpu_tables import PAGE, ROOT, chosen_tile, read, with_tables
from onpolicy.ops.triton import linear

TEXTS = {
    name: " ".join((ROOT / name).read_text().split())
    for name in ("README.md", "benchmarks/gpu.md", "docs/gpu_operators.md", "docs/first_gpu.md")
}


def test_the_pages_tables_are_those_of_the_records():
    page = PAGE.read_text()
    assert re.findall(r"<!-- (\w+): begin -->", page) == ["operators", "tiles", "keys"]
    assert with_tables(page) == page, "call python -m benchmarks.gpu_tables"


@pytest.mark.parametrize("table", ["operators", "tiles", "keys"])
def test_a_number_that_was_written_by_hand_is_found(table):
    page = PAGE.read_text()
    number = re.compile(r"\d\.\d\d").search(page, page.index(f"<!-- {table}: begin -->"))
    changed = f"{page[: number.start()]}9.99{page[number.end() :]}"
    assert with_tables(changed) == page != changed


def test_the_tile_in_the_table_is_the_one_that_a_hopper_gpu_takes(monkeypatch):
    monkeypatch.setattr(linear, "capability", lambda x: 90)
    x = torch.empty(1, dtype=torch.bfloat16)
    rows = read("gpu_linear_tiles")["rows"]
    taken = [linear.choose_tile(x, row["M"], row["N"]) for row in rows]
    assert [f"{tile.rows}x{tile.columns}" for tile in taken] == [*map(chosen_tile, rows)]
    assert len({*taken}) == 2


def slower_by():
    rows = {(r["ROWS"], r["num_stages"]): r["ms"] for r in read("gpu_key_gradient")["rows"]
            if r["case"] == "short"}  # fmt: skip
    return round(100 * rows[64, 1] / rows[32, 2] - 100)


def test_the_cost_of_the_tile_for_keys_is_that_of_the_record():
    assert f"costs [{slower_by()} % more time]" in TEXTS["docs/gpu_operators.md"]


def test_goals_and_the_number_of_operators_are_those_of_the_record():
    record, page = read("gpu_ops"), TEXTS["benchmarks/gpu.md"]
    goals = {
        backend: [case["variants"][backend]["goal_met"] for case in record["cases"] if case["goal"]]
        for backend in ("hopper", "triton")
    }
    counts = [(sum(met), len(met)) for met in goals.values()]
    (hopper, of), (triton, _) = counts
    assert f"`hopper` met {hopper} of its {of} goals, `triton` {triton} of {of}" in page
    met = sum(chain(*goals.values()))
    assert f"{met} goals met, {2 * of - met} missed" in page
    assert f"{len(record['cases'])} of now 174 rows" in page


def test_what_has_run_is_what_the_records_say():
    runs, page = read("gpu_engines_h100")["runs"], TEXTS["benchmarks/gpu.md"]
    first, long = runs["q1"], runs["t06_hopper"]
    for run in (
        first,
        runs["qshare"],
        long,
        runs["v06_triton"],
        *read("gpu_verify")["runs"].values(),
    ):
        assert run["num_mismatched_tokens"] == 0
        assert f"0 of {run['num_compared_tokens']:,} tokens mismatched" in page
    assert runs["q2"]["run_hash"] == first["run_hash"] and first["run_hash"] in page
    assert f"reward {first['rewards'][0]:.2f} to {first['rewards'][-1]:.2f}" in page
    speeds = ("rollout_tokens_per_second", "train_tokens_per_second")
    rollout, train = ([f"{x:,.0f}" for x in long[name]] for name in speeds)
    assert f"rollouts of {rollout[0]}, {rollout[1]} and {rollout[2]} tokens/s" in page
    assert f"training of {train[0]}, {train[1]} and {train[2]}, beside" in page
    suite = read("gpu_test_h100")
    assert f"{suite['outcomes']['passed']} tests pass" in page
    assert f"{suite['compared_values'] / 1e11:.1f} x 10^11 values" in page
    assert f"{read('gpu_test_h200')['outcomes']['passed']} of 11" in page


def test_versions_are_the_records_and_the_pages_say_that_the_extra_installs_others():
    machine = read("gpu_ops")["machine"]
    said = f"torch {machine['torch']} with CUDA {machine['cuda']}, Triton {machine['triton']}"
    assert said in TEXTS["benchmarks/gpu.md"]
    extra = "`pip install -e '.[gpu]'`"
    assert f"in earlier versions than {extra} installs" in TEXTS["README.md"]
    assert f"{extra} installs other versions" in TEXTS["benchmarks/gpu.md"]
    torch_minor = machine["torch"].rpartition(".")[0]
    assert f"with torch {torch_minor} and SGLang" in TEXTS["docs/first_gpu.md"]
    assert f"**Not run:** the versions that {extra} installs" in TEXTS["docs/first_gpu.md"]


MEASURED = re.compile(r"gib|mem|peak|bytes_(used|held)", re.I)


def test_no_record_of_a_gpu_holds_the_memory_of_a_run_and_the_pages_say_so():
    """A record that does is to stand beside the forecast in docs/first_gpu.md."""
    files = [*gpu_tables.RESULTS.glob("gpu_*.json")]
    keys = {key for file in files for key in keys_of(read(file.stem))}
    assert files and not [*filter(MEASURED.search, keys)]
    assert MEASURED.search("peak_gpu_bytes") and MEASURED.search("memory of the GPU, GiB")
    for page in ("benchmarks/gpu.md", "docs/first_gpu.md"):
        assert "no record holds what a run took" in TEXTS[page] and "27.5 GiB" not in TEXTS[page]


def keys_of(value):
    if isinstance(value, dict):
        names = [
            name for name in value if "::" not in name
        ]  # of settings and numbers, not of tests
        return chain(names, *map(keys_of, value.values()))
    return chain(*map(keys_of, value)) if isinstance(value, list) else iter(())
