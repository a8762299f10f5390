"""Every name that is one of a few is refused if it is another, wherever these packages take one."""

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import fallback_correction
import onpolicy.algorithm
from fallback_correction.governor import Governor, GovernorConfig
from fallback_correction.ranges import require_choice
from tests.support.token_batches import by_log_ratios

LOG_PROBS, POLICY = torch.zeros(1), np.array([1.0])
EXAMPLES = {
    "advantages": POLICY, "after": "tis", "applied": LOG_PROBS, "baseline": "mean",
    "batch": by_log_ratios([[0.0]]), "before": "stock", "bound": "clip", "bounds": (0.5, 2.0),
    "budget": 1.0, "config": GovernorConfig(), "formula": "", "lam": 1.0, "log_probs": LOG_PROBS,
    "lower": 0.0,
    "measure": "log", "mu": POLICY, "name": "token_k1", "old_log_probs": LOG_PROBS, "peers": "",
    "policy": POLICY, "r": LOG_PROBS, "ratio": "token", "raw": LOG_PROBS, "reading": "weighted",
    "reason": "", "ref_log_probs": LOG_PROBS, "rewards": [[1.0]], "setting": "eps_clip",
    "source": "",
    "upper": 1.0, "weights": LOG_PROBS,
}  # fmt: skip
"""A value for every parameter that has no default, by its name."""


def modules():
    for package in (fallback_correction, onpolicy.algorithm):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def literal_of(hint):
    """The Literal in a type, be it alone or beside None."""
    arms = [arm for arm in (hint, *get_args(hint)) if get_origin(arm) is Literal]
    return arms[0] if arms else None


def takers():
    """(what takes a name, its parameter, the Literal) of the packages."""
    for module in modules():
        for name, taker in inspect.getmembers(module, callable):
            if getattr(taker, "__module__", "") != module.__name__ or name.startswith("_"):
                continue
            is_plain_class = inspect.isclass(taker) and not dataclasses.is_dataclass(taker)
            for parameter, hint in get_type_hints(
                taker.__init__ if is_plain_class else taker
            ).items():
                if literal_of(hint) and parameter != "return":
                    yield pytest.param(taker, parameter, literal_of(hint), id=f"{name}-{parameter}")


TAKERS = list(takers())


@pytest.mark.parametrize(("taker", "parameter", "choices"), TAKERS)
@pytest.mark.parametrize("wrong", [str.upper, lambda name: f"{name}s", lambda _: ""])
def test_an_unknown_name_is_refused_and_the_choices_are_named(taker, parameter, choices, wrong):
    given = {
        name: EXAMPLES[name]
        for name, one in inspect.signature(taker).parameters.items()
        if one.default is one.empty and name != parameter
    }
    unknown = wrong(get_args(choices)[-1])
    if unknown in get_args(choices):  # "" is a mode of the discrepancy: none
        unknown = "none"
    with pytest.raises(ValueError, match=f"{parameter}='{unknown}': unknown") as error:
        taker(**{**given, parameter: unknown})
    # The level `none` is a name, but of no weights.
    assert all(name in str(error.value) for name in get_args(choices) if name != "none")


def test_the_walk_finds_what_it_is_for():
    found = {f"{taker.__name__}.{parameter}" for taker, parameter, _ in (p.values for p in TAKERS)}
    assert found >= {
        "CorrectionConfig.level", "CorrectionConfig.mode", "RejectionRule.statistic", "Veto.by",
        "ObjectiveConfig.kind", "kl_estimate.kind", "token_shares.aggregation",
        "group_advantages.estimator", "DiscrepancyConfig.mode", "Governor.rung",
        "RolloutCorrectionConfig.rollout_is", "CorrectionSettings.tis_mode", "RejectionOption.name",
    }  # fmt: skip


def test_a_rung_of_a_checkpoint_is_held_to_it_too():
    state = Governor(GovernorConfig()).state_dict()
    with pytest.raises(ValueError, match=r"rung='top': unknown. Use one of stock, tis, mis"):
        Governor(GovernorConfig()).load_state_dict({**state, "rung": "top"})


def test_a_known_name_is_accepted():
    require_choice("mode", "clip", Literal["truncate", "clip"])
