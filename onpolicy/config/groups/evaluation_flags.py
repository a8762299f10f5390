"""The flags of evaluation: sets of prompts, each with its own sampling and scoring."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fallback_correction.ranges import ReadBy, Rule, above, at_least, at_most, broken_rule
from onpolicy.config.flags import flags_of
from onpolicy.config.groups.agent_flags import has_agent
from onpolicy.config.groups.input_flags import PROCEDURAL, DataConfig
from onpolicy.config.groups.reward_flags import RemoteName, RuleName, sources_of, weights_of
from onpolicy.config.groups.rollout_flags import NO_LIMIT_IS_MINUS_ONE, RolloutConfig
from onpolicy.config.kinds import SMALLEST_TEMPERATURE, Count, CountOrZero
from onpolicy.config.rules import BY_CONTENT, NO_RESULT, Against, Facts, Parsed, Together
from onpolicy.config.strict_yaml import broken_kind, read_mapping, require_known, require_mapping
from onpolicy.errors import ConfigError

NOT_NEARLY_GREEDY = Rule(
    lambda x: not 0 < x < SMALLEST_TEMPERATURE,
    f"SGLang samples greedily below {SMALLEST_TEMPERATURE:g}. Give 0, or a larger value.",
)
BY_EVAL = ReadBy("--eval-interval", lambda run: run.eval_interval or run.eval_config)

SET_NAME = re.compile(r"(?!.*\.(?:jsonl|parquet)$)[A-Za-z0-9][A-Za-z0-9_.+-]*")
A_NAME = "a name is letters, digits and _ . + -"

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """An evaluation set: prompts, sampling, scoring, interval. Each field is a key of --eval-config."""

    name: str
    path: str
    interval: CountOrZero
    n_samples_per_eval_prompt: Count
    temperature: Annotated[float, at_least(0), NOT_NEARLY_GREEDY]
    top_p: Annotated[float, above(0), at_most(1)]
    top_k: Annotated[int, at_least(-1), NO_LIMIT_IS_MINUS_ONE]
    max_response_len: Count
    input_key: str
    label_key: str

    rm_type: Literal["", RuleName, RemoteName] = ""
    """What scores its responses, by the flags of the run; empty: `rewards`, or else what scores the
    run's."""

    rewards: tuple[str, ...] = ()
    flag: str = "--eval-prompt-data"

    @property
    def measure(self) -> "EvalSet":
        """Return the settings that its values depend on besides its prompts: no path, no interval."""
        return replace(self, path="", interval=0, flag="")

    @property
    def sources(self) -> dict[str, float]:
        """Return the rules and functions that score its responses, with weights; empty: the run's."""
        return sources_of(self.rm_type, self.rewards)

    def is_due(self, step: int) -> bool:
        """Return whether it is evaluated after `step` rollouts."""
        return self.interval > 0 and step % self.interval == 0


KEYS = {flag.name: flag for flag in flags_of(EvalSet) if flag.name != "flag"}
OWN = ("name", "path")
"""Keys that every set has to itself."""

SCORES = ("rm_type", "rewards")
"""Keys of which one says what scores a set."""


def eval_sets(values: Sequence[str]) -> dict[str, str]:
    """Return the path of every evaluation set by name; the name of a single path is empty. Raises
    ConfigError for values that are neither one path nor pairs of a name and a path (as in slime and
    Miles)."""
    names, rule = values[::2], ""
    if len(values) == 1:
        return {"": values[0]}
    if len(values) % 2:
        rule = f"{len(values)} values are neither one path nor names with their paths"
    elif wrong := [name for name in names if not SET_NAME.fullmatch(name)]:
        rule = f"{wrong[0]!r} stands where the name of a set is expected"
    elif len(set(names)) < len(names):
        rule = "two sets have the same name"
    if rule:
        raise ConfigError(
            f"--eval-prompt-data={' '.join(values)}: {rule}. Give one path, or: name path [name path "
            f"...], where {A_NAME}"
        )
    return dict(zip(names, values[1::2], strict=True))


def read_sets(file: str) -> dict[str, Values]:
    """Return the values of each set in an --eval-config by name; empty without a file. The file has
    slime's form, `eval: {defaults: {...}, datasets: [{name, path, ...}, ...]}`. Raises ConfigError
    for an unknown key, a value that its key does not take, and a duplicate set."""
    if not file:
        return {}
    name = f"--eval-config={file}"
    content = read_mapping(file, name)
    for key in content:
        require_known(key, ["eval"], name)
    body = require_mapping(content.get("eval"), f"{name}: eval", "defaults and datasets")
    for key in body:
        require_known(key, ["defaults", "datasets"], f"{name}: eval")
    defaults = _checked(body.get("defaults", {}), f"{name}: defaults", [*KEYS.keys() - {*OWN}])
    datasets = body.get("datasets")
    if not isinstance(datasets, list) or not datasets:
        raise ConfigError(f"{name}: datasets: must be a list of sets. Give one with name and path.")
    found: dict[str, Values] = {}
    for number, given in enumerate(datasets, 1):
        place = f"{name}: set {number}"
        values = _checked(given, place, [*KEYS])
        if missing := [key for key in OWN if not values.get(key)]:
            raise ConfigError(
                f"{place}: {missing[0]} is missing. Give every set a name and a path."
            )
        if not SET_NAME.fullmatch(values["name"]):
            raise ConfigError(f"{place}: name={values['name']!r}: {A_NAME}.")
        if values["name"] in found:
            raise ConfigError(f"{place}: name={values['name']}: an earlier set has it. Rename one.")
        is_made = values["path"].startswith(PROCEDURAL)
        said = [key for key in SCORES if values.get(key)]
        if is_made and said:
            raise ConfigError(f"{place}: {said[0]}: {PROCEDURAL} has its own scorer. Leave it out.")
        own = is_made or any(key in values for key in SCORES)
        common = {k: v for k, v in defaults.items() if not (own and k in SCORES)}
        found[values["name"]] = {**common, **values, "flag": f"{name}: {values['name']}: path"}
    return found


def _checked(given: object, place: str, known: Sequence[str]) -> Values:
    """Return the values of a set, or of the defaults. Raises ConfigError for an invalid one."""
    values = {}
    for key, value in require_mapping(given, place, "keys to values").items():
        require_known(key, known, place)
        kind = KEYS[key].kind
        if rule := broken_kind(value, kind):
            raise ConfigError(f"{place}: {key}={value!r}: {rule}.")
        if key == "rewards":
            value = (value,) if isinstance(value, str) else tuple(value)
            weights_of(value, f"{place}: rewards")
        values[key] = kind(str(value)) if kind in (int, float) else value
        if rule := broken_rule(values[key], KEYS[key].notes):
            raise ConfigError(f"{place}: {key}={value!r}: {rule}")
    if values.get("rm_type") and values.get("rewards"):
        raise ConfigError(f"{place}: rm_type and rewards: only one may score. Leave the other out.")
    return values


def sets_of(
    evaluation: "EvalConfig", rollout: RolloutConfig, data: DataConfig
) -> dict[str, EvalSet]:
    """Return the sets by name, with flags as defaults."""
    length = evaluation.eval_max_response_len or rollout.rollout_max_response_len
    defaults = {
        "interval": evaluation.eval_interval,
        "n_samples_per_eval_prompt": evaluation.n_samples_per_eval_prompt,
        "temperature": evaluation.eval_temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": rollout.rollout_top_k,
        "max_response_len": length,
        "input_key": data.input_key,
        "label_key": data.label_key,
    }
    given = read_sets(evaluation.eval_config)
    if paths := evaluation.eval_prompt_data:
        given = {name: {"name": name, "path": path} for name, path in eval_sets(paths).items()}
    return {name: EvalSet(**{**defaults, **values}) for name, values in given.items()}


def _not_due(run: Facts) -> str | None:
    """Return the message about an interval or sets that would do nothing."""
    sets = run.config.eval_sets
    given = "--eval-interval={}, --eval-prompt-data={!r}, --eval-config={!r}".format(
        run.eval_interval, " ".join(run.eval_prompt_data), run.eval_config
    )
    if run.eval_interval and not sets:
        return f"{given}: there is nothing to evaluate. Give sets, or leave the interval out."
    if never := [each.name for each in sets.values() if not each.interval]:
        return f"{given}: {never[0] or 'the set'} would never be evaluated. Give --eval-interval."
    return None


def ks_of(count: int) -> list[int]:
    """Return the k of pass@k: 1, 2, 4, 8 ... below the samples of a prompt, and their number."""
    return [*(1 << i for i in range((count - 1).bit_length())), count]


def _never_best(run: Facts) -> str | None:
    """Return the reason why --save-best-metric would choose no checkpoint."""
    known: list[str] = []
    for name, each in run.config.eval_sets.items():
        n, prefix = each.n_samples_per_eval_prompt, f"eval/{name}/" if name else "eval/"
        metrics = [f"avg@{n}", *(f"pass@{k}" for k in ks_of(n)), *([f"maj@{n}"] if n > 1 else [])]
        known += [prefix + metric for metric in metrics]
        if run.save_best_metric in known:
            if run.save_interval and each.interval % run.save_interval:
                return (
                    f"the set is evaluated after every {each.interval} rollouts, and not all of these "
                    f"weights are saved with --save-interval={run.save_interval}. Give intervals of "
                    "which one divides the other."
                )
            return None
    return f"no evaluation says that. Give one of: {', '.join(known) or 'none, without a set'}."


NEVER_BEST = Together(
    lambda run: run.save_best_metric and _never_best(run),
    "--save-best-metric={run.save_best_metric}: {found}",
)


def _unscored(run: Facts) -> str | None:
    """Return the first set whose responses nothing would score."""
    if run.config.reward.sources or has_agent(run):
        return None
    for each in run.config.eval_sets.values():
        if not (each.sources or each.path.startswith(PROCEDURAL)):
            return f"{each.flag}={each.path}"
    return None


@dataclass(frozen=True, kw_only=True)
class EvalSetsConfig:
    eval_prompt_data: Annotated[tuple[str, ...], BY_CONTENT, Parsed(eval_sets)] = ()
    """Evaluation prompts in the formats of --prompt-data: one path, or sets as NAME PATH NAME PATH."""

    eval_config: Annotated[
        str, BY_CONTENT, Parsed(read_sets),
        Against(lambda run: run.eval_prompt_data, "--eval-prompt-data names sets too"),
        Together(_unscored,
            "{found}: no reward scores its responses. Give the set rm_type or rewards in --eval-config, "
            "or the run --rm-type, --custom-rm-path or --rewards."),
    ] = ""  # fmt: skip
    """YAML file with evaluation sets, each with its own samples per prompt, sampling, length, interval
    and reward (docs/outputs.md). The flags are the defaults of the sets."""

    n_samples_per_eval_prompt: Annotated[Count, BY_EVAL] = 1
    """Number of responses n per evaluation prompt, for avg@n, pass@1, pass@2, pass@4, ..., and maj@n
    (docs/outputs.md)."""

    eval_temperature: Annotated[float, at_least(0), NOT_NEARLY_GREEDY, BY_EVAL] = 1.0
    """Sampling temperature of evaluation. 0 is greedy."""

    eval_max_response_len: Annotated[int | None, at_least(1), BY_EVAL] = None
    """Longest evaluation response, in tokens. The default is --rollout-max-response-len."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(EvalSetsConfig):
    eval_interval: Annotated[CountOrZero, NO_RESULT, Together(_not_due, "{found}")] = 0
    """Evaluate before the first rollout and after every this many rollouts. 0 never evaluates."""
