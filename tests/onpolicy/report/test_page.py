"""`onpolicy report`: what it reads, how it groups runs, and a page that is safe and self-contained.

How the page looks and behaves in a browser is tested in tests/e2e/test_report_in_browser.py.
"""

import json
import math
import re
import subprocess
import sys

import pytest

from onpolicy.cli.main import main
from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.report.page import (
    group_runs,
    median_curve,
    page_data,
    read_runs,
    render,
)
from tests.support.fake_runs import HOSTILE, aligned_run, governed_run, stock_run, write_run


def rewards(*values):
    return [{"step": step, "rollout/raw_reward": value} for step, value in enumerate(values)]


def panel(data, title):
    return next(panel for panel in data["panels"] if panel["title"] == title)


def groups(*paths):
    return {group.name: group.runs for group in group_runs(read_runs(paths))}


# Reading


def test_lines_of_one_step_are_put_together_and_what_is_no_number_is_left_out(tmp_path):
    records = [{"step": 1, "b": 2.5}, {"step": 0, "a": 1}, {"step": 0, "b": 2, "c": "x", "d": None}]
    (run,) = read_runs([write_run(tmp_path / "run", records)])
    assert run.curves == {"a": {0: 1}, "b": {0: 2, 1: 2.5}}


def test_a_metrics_file_stands_for_its_directory_and_is_read_once(tmp_path):
    directory = write_run(tmp_path / "a", rewards(0.5), seed=3)
    (run,) = read_runs([directory, f"{directory}/metrics.jsonl"])
    assert (run.name, run.config["seed"]) == ("a", 3)


def test_a_metrics_file_of_another_name_does_not_take_its_neighbours_configuration(tmp_path):
    write_run(tmp_path / "a", rewards(0.5), moves=[{"step": 0}])
    (tmp_path / "a" / "old.jsonl").write_text('{"step": 0, "rollout/raw_reward": 1}\n')
    (run,) = read_runs([str(tmp_path / "a" / "old.jsonl")])
    assert (run.name, run.config, run.moves) == ("old.jsonl", None, [])


def test_runs_are_named_by_as_much_of_their_paths_as_tells_them_apart(tmp_path):
    paths = [write_run(tmp_path / parent / "run.1", rewards(0.5)) for parent in ("a", "b")]
    assert [run.name for run in read_runs(paths)] == ["a/run.1", "b/run.1"]


def test_the_governors_moves_are_read(tmp_path):
    moves = [{"step": 4, "from": "plain", "to": "tis", "reason": "k3"}, {"step": 6}]
    (run,) = read_runs([write_run(tmp_path / "run", rewards(0.5), moves)])
    assert run.moves[0] == {"step": 4, "source": "plain", "target": "tis", "reason": "k3"}
    assert run.moves[1]["reason"] == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"step": 0}\n{"step": \n{"step": 2}\n', 2), ('{"step": 0}\nnot JSON\n', 2), ("[1]\n", 1),
        ('{"step": 0}\n\n{"reward": 1}\n', 3), ('{"step": true}\n', 1),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_by_file_and_number(text, line, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}:{line}: ")):
        read_runs([str(tmp_path)])


def test_a_last_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1}\n{"step": 1, "a')
    assert read_runs([str(tmp_path)])[0].curves == {"a": {0: 1}}


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"RUN=.*: has no metrics.jsonl. Give the --run-dir"):
        read_runs([str(tmp_path)])
    with pytest.raises(ConfigError, match="RUN=nowhere: no such directory or file"):
        read_runs(["nowhere"])
    write_run(tmp_path / "a", rewards(0.5))
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: not valid JSON"):
        read_runs([str(tmp_path / "a")])


# Groups


def test_runs_that_differ_only_in_seed_and_place_are_one_group(tmp_path):
    paths = [
        write_run(tmp_path / "x", rewards(0), seed=1, lr=1e-6, save="there"),
        write_run(tmp_path / "y", rewards(0), seed=1, lr=2e-6, save="here"),
        write_run(tmp_path / "z", rewards(0), seed=2, lr=1e-6, save="elsewhere"),
    ]
    assert groups(*paths) == {"lr=1e-06": (0, 2), "lr=2e-06": (1,)}


def test_groups_that_differ_in_much_or_in_unknown_ways_are_named_by_their_directories(tmp_path):
    values = {"lr": 2e-6, "eps_clip": 0.3, "use_kl_loss": True, "weight_decay": 0.0}
    paths = [write_run(tmp_path / f"tis-seed{seed}", rewards(0), seed=seed) for seed in (1, 2)]
    paths.append(write_run(tmp_path / "plain", rewards(0), **values))
    assert groups(*paths) == {"tis": (0, 1), "plain": (2,)}
    (tmp_path / "plain" / "config.json").unlink()
    assert groups(*paths) == {"tis": (0, 1), "plain": (2,)}
    assert groups(*paths[:2]) == {"tis": (0, 1)}


def test_paths_in_a_groups_name_are_shortened_unless_they_become_equal(tmp_path):
    models = ["/models/qwen", "/models/llama", "/other/llama"]
    paths = [
        write_run(tmp_path / str(number), rewards(0), hf_checkpoint=model)
        for number, model in enumerate(models)
    ]
    assert list(groups(*paths[:2])) == ["hf_checkpoint=qwen", "hf_checkpoint=llama"]
    assert list(groups(*paths)) == ["0", "1", "2"]


def test_the_median_is_over_the_runs_that_have_a_finite_value_there():
    curves = [{0: 1.0, 1: 4.0, 2: math.nan}, {0: 3.0, 1: math.inf}, {0: 2.0, 5: 7}]
    median = median_curve(curves)
    assert (median[0], median[1], median[5]) == (2.0, 4.0, 7)
    assert list(median) == [0, 1, 2, 5] and math.isnan(median[2])


# The page


def test_panels_hold_what_was_logged_and_those_without_data_are_left_out(tmp_path):
    paths = [aligned_run(tmp_path / "a", 1), governed_run(tmp_path / "b")]
    data = page_data(read_runs(paths))
    fractions = panel(data, "Tokens that corrections touched (share)")["metrics"]
    assert [m["name"] for m in fractions] == [
        "correction/mis_masked_fraction",
        "correction/tis_clipped_fraction",
    ]
    assert [list(m["runs"]) for m in fractions] == [[1], [1]]
    titles = [panel["title"] for panel in data["panels"]]
    assert "Lambda" in titles and "Loss" not in titles
    assert page_data(read_runs([write_run(tmp_path / "c", [])]))["panels"] == []


def test_runs_of_different_lengths_have_a_median_to_the_end_of_the_longest(tmp_path):
    paths = [write_run(tmp_path / "a", rewards(0.2, 0.4), seed=1)]
    paths += [write_run(tmp_path / "b", rewards(0.6, 0.8, math.nan), seed=2)]
    (metric,) = panel(page_data(read_runs(paths)), "Reward")["metrics"]
    assert metric["runs"] == {0: [[0, 1], [0.2, 0.4]], 1: [[0, 1, 2], [0.6, 0.8, "nan"]]}
    assert metric["medians"] == {0: [[0, 1, 2], [0.4, 0.6, "nan"]]}


def test_the_table_has_rewards_tokens_and_moves(tmp_path):
    records = rewards(0.25, 0.5)
    for record in records:
        record |= {"parity/num_compared_tokens": 10, "parity/num_mismatched_tokens": 1}
    records.append({"step": 2, "eval/avg@4": 1.0})
    path = write_run(tmp_path / "run", records, [{"step": 1}], seed=5)
    (row,) = page_data(read_runs([path]))["runs"]
    assert row["moves"] == [{"step": 1, "source": "", "target": "", "reason": ""}]
    assert {k: v for k, v in row.items() if k != "moves"} == {
        "name": "run", "seed": 5, "rollouts": 2, "first_reward": 0.25, "last_reward": 0.5,
        "compared": 20, "mismatched": 2, "same_as": None, "episodes": None, "places": {},
    }  # fmt: skip


def timed(*seconds):
    """Rollouts of so many seconds, of which each trains 10 tokens a second for half of them."""
    return [
        {"step": step, "rollout/raw_reward": 0.5, "perf/step_time": each, "perf/train_time": each / 2,
         "perf/train_tokens_per_second": 10}
        for step, each in enumerate(seconds)
    ]  # fmt: skip


def test_a_step_lies_where_the_steps_before_it_end(tmp_path):
    """On the axes of tokens and seconds, an evaluation after the last rollout too."""
    records = [*timed(4.0, 2.0), {"step": 2, "eval/avg@4": 1.0}]
    runs = [write_run(tmp_path / "a", records), write_run(tmp_path / "b", rewards(0.5))]
    timed_run, other = page_data(read_runs(runs))["runs"]
    assert timed_run["places"] == {
        "tokens": [[0, 1, 2], [0, 20, 30]],
        "seconds": [[0, 1, 2], [0, 4, 6]],
    }
    assert other["places"] == {}


def test_a_median_never_goes_back_in_time(tmp_path):
    """Where a slow run ends before a fast one, the median of the places would (a curve that ran
    backwards: htm-community/nupic.visualizations #70)."""
    paths = [write_run(tmp_path / "slow", timed(100, 100), seed=1)]
    paths += [write_run(tmp_path / "fast", timed(10, 10, 10, 10), seed=2)]
    (group,) = page_data(read_runs(paths))["groups"]
    assert group["places"]["seconds"] == [[0, 1, 2, 3], [0, 55, 110, 120]]


def test_the_flags_in_which_groups_differ_are_listed_with_their_values(tmp_path):
    paths = [
        write_run(tmp_path / "a", rewards(0), seed=1, lr=1e-6),
        write_run(tmp_path / "b", rewards(0), seed=2, lr=1e-6, rm_type=HOSTILE),
        write_run(tmp_path / "c", rewards(0), lr=2e-6),
    ]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metrics.jsonl").write_text('{"step": 0}')
    data = page_data(read_runs([*paths, str(tmp_path / "d")]))
    known = TrainConfig().to_dict()["rm_type"]
    assert sorted(data["differences"]) == [
        ("--lr", ["1e-06", "1e-06", "2e-06", None]),
        ("--rm-type", [json.dumps(known), json.dumps(HOSTILE), json.dumps(known), None]),
    ]
    assert page_data(read_runs(paths[:1]))["differences"] == []


def test_a_run_with_the_values_of_an_earlier_one_is_named(tmp_path):
    values = [rewards(0.5, math.nan), rewards(0.25), rewards(0.5, math.nan), [], []]
    for record in values[2]:
        record |= {"perf/step_time": 3.5, "rollout/prefix_cache_hit_rate": 0.5}
    paths = [write_run(tmp_path / str(i), records) for i, records in enumerate(values)]
    data = page_data(read_runs(paths))
    assert [run["same_as"] for run in data["runs"]] == [None, None, 0, None, None]


def test_evaluation_sets_share_a_panel_and_say_which_they_are(tmp_path):
    record = {"step": 0, "eval/aime/avg@4": 0.1, "eval/math/avg@4": 0.5, "eval/aime/pass@4": 0.2}
    data = page_data(read_runs([write_run(tmp_path / "run", [record])]))
    metrics = panel(data, "Evaluation reward")["metrics"]
    assert [m["name"] for m in metrics] == ["eval/aime/avg@4", "eval/math/avg@4"]
    assert metrics[0]["meaning"].endswith("k samples (of the set aime)")


def test_text_of_a_run_cannot_become_code(tmp_path):
    # A directory's name cannot hold a slash, but <img onerror> and <script> need none.
    hostile_name = HOSTILE.replace("/", "")
    paths = [
        write_run(tmp_path / hostile_name, rewards(0), [{"step": 0, "reason": HOSTILE}], lr=1e-6),
        write_run(tmp_path / "b", [{"step": 0, "mismatch/ess" + HOSTILE: 1}], label_key=HOSTILE),
    ]
    page = render(read_runs(paths), {})
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 2
    text = re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)
    assert json.loads(text)["runs"][0]["moves"][0]["reason"] == HOSTILE


def test_the_page_loads_nothing(tmp_path):
    page = render(read_runs([stock_run(tmp_path / "a", 1), aligned_run(tmp_path / "b", 2)]), {})
    assert not re.search(r"\b(src|href|url|import|srcset|action)\s*[=(]", page)
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


# The command


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys):
    output = tmp_path / "page.html"
    assert main(["report", aligned_run(tmp_path / "a", 1), "--output", str(output)]) == 0
    assert output.read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out == f"{output}: 1 run\n"


def test_mistakes_are_one_line(tmp_path, capsys):
    run = aligned_run(tmp_path / "a", 1)
    assert main(["report"]) == 2
    assert "RUN is missing" in capsys.readouterr().err
    assert main(["report", run, "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_it_needs_neither_torch_nor_matplotlib(tmp_path):
    script = (
        "import sys; from onpolicy.cli.main import main; main(sys.argv[1:]);"
        "assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    argv = ["report", aligned_run(tmp_path / "a", 1), "--output", str(tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", script, *argv], check=True)
