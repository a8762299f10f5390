"""The record of what shared prefixes gain is that of the picture, beside the limits that are due."""

import json
from pathlib import Path

import benchmarks
from benchmarks.shared_prefixes_growth import BY_PROMPT, BY_SAMPLES, RESPONSE, draw
from onpolicy.run.launch.input_checks import distinct_share

RECORD = Path(benchmarks.__path__[0]) / "results" / "shared_prefixes_growth.json"


def test_every_point_was_measured_beside_its_limit(tmp_path):
    cases = json.loads(RECORD.read_text())["cases"]
    assert {(case["prompt"], case["n"]) for case in cases} == {*BY_SAMPLES, *BY_PROMPT}
    for case in cases:
        share = distinct_share([case["prompt"]], RESPONSE, case["n"])
        assert abs(case["limit"] * share - 1) < 1e-12
        assert 1 < case["processor"] < case["limit"]
    draw(cases, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size
