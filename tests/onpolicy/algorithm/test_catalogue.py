"""Choices, code, rules and docs agree with the registry."""

from pathlib import Path
from typing import get_args

import pytest

from onpolicy.algorithm import catalogue
from onpolicy.algorithm.catalogue import ESTIMATORS, OBJECTIVES, READ_BY_BOUND
from onpolicy.algorithm.objectives import BOUNDS, RATIOS, ObjectiveConfig
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_types, spelled
from onpolicy.config.groups.algorithm_flags import RECIPES, Recipe, recipe_of

DOCS = (Path(__file__).parents[3] / "docs/losses.md").read_text()


def test_every_name_is_a_choice_and_has_its_code():
    assert [*OBJECTIVES] == [*get_args(catalogue.Objective)]
    assert [*ESTIMATORS] == [*get_args(catalogue.AdvantageEstimator)]
    assert {*BOUNDS} == {*READ_BY_BOUND} == {*get_args(catalogue.Bound)}
    assert {*RATIOS} == {*get_args(catalogue.Ratio)}
    assert ["", *RECIPES] == [*get_args(Recipe)]


def test_what_a_bound_reads_is_a_setting_of_the_objective_and_a_flag():
    for settings in READ_BY_BOUND.values():
        assert {*settings} <= {*ObjectiveConfig.__dataclass_fields__} & {*flag_types(TrainConfig)}


def test_the_docs_have_a_row_for_every_entry():
    for name, entry in OBJECTIVES.items():
        cells = (entry.formula, entry.ratio, entry.bound, entry.source, entry.peers)
        assert f"| `{name}` | {' | '.join(cells)} |" in DOCS
    for name, entry in ESTIMATORS.items():
        assert f"| `{name}` | {entry.formula} | {entry.source} | {entry.peers} |" in DOCS
    for name, given in RECIPES.items():
        flags = (spelled(k) if v is True else f"{spelled(k)} {v}" for k, v in given.items())
        assert f"| `{name}` | `{' '.join(flags)}` |" in DOCS


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_its_flags_and_the_command_line_wins(name):
    values = parse(TrainConfig, ["--recipe", name], "onpolicy train").to_dict()
    assert {key: values[key] for key in RECIPES[name]} == RECIPES[name]
    assert recipe_of(values).startswith(f"recipe {name}: ") and "otherwise" not in recipe_of(values)


def test_what_is_given_otherwise_is_said():
    argv = ["--eps-clip-high", "0.3", "--recipe", "dapo"]
    values = parse(TrainConfig, argv, "onpolicy train").to_dict()
    assert values["eps_clip_high"] == 0.3 and values["dynamic_sampling"]
    assert recipe_of(values).endswith("given otherwise: eps_clip_high 0.3")
    assert recipe_of(TrainConfig().to_dict()) == ""
