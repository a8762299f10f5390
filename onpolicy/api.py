"""Training from Python: `from onpolicy import Sample, TrainConfig, train`.

It is what the command `onpolicy train` does, in this process and the processes that it starts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from onpolicy.cli.command import begin_with
from onpolicy.cli.parse import config_of
from onpolicy.compat.process import collect_rarely, prepare_process
from onpolicy.config import TrainConfig, validate
from onpolicy.config.flags import with_flags
from onpolicy.errors import ConfigError
from onpolicy.system import files

if TYPE_CHECKING:
    from onpolicy.outputs.totals import RunSummary
    from onpolicy.rollout.rollouter import Rollouter
    from onpolicy.run.journal import OnMetrics
    from onpolicy.types import Sample

Reward = str | Callable[["Sample"], Any]
"""The name of a rule (math, dapo, exact), or a function as docs/rewards.md describes it."""

CACHE = Path.home() / ".cache" / "onpolicy" / "rewards"
"""Where functions of scripts and notebooks are kept for the processes that score."""


def train(
    config: TrainConfig | Mapping[str, Any],
    *,
    rewards: Sequence[Reward] = (),
    rollouter: Rollouter | None = None,
    on_metrics: OnMetrics | None = None,
) -> RunSummary:
    """Train, and return the run's summary.

    config: a configuration, or flags by their names with _ for -, as in a file of
    --custom-config-path. rewards: their sum is a sample's reward. Functions run in worker processes:
    one of a module is imported there, one of a script or a notebook is sent as it is now, with the
    globals that it uses. rollouter: makes episodes; by default the flags say what does. on_metrics: is
    called after each rollout and evaluation; what it raises ends the run.

    Raises ConfigError before anything starts if flags, data or model do not fit, and other
    OnPolicyErrors when a run cannot go on. A script calls it under `if __name__ == "__main__":`.
    """
    prepare_process()
    collect_rarely()
    if not isinstance(config, TrainConfig):
        config = config_of(TrainConfig, config, "onpolicy.train")
    if rewards:
        config = with_rewards(config, rewards)
    validate(config)
    config = begin_with(config)
    with _no_event_loop():
        return run_configured(config, rollouter=rollouter, on_metrics=on_metrics)


def run_configured(
    config: TrainConfig,
    *,
    rollouter: Rollouter | None = None,
    on_metrics: OnMetrics | None = None,
    announce: Callable[[TrainConfig], None] = lambda config: None,
) -> RunSummary:
    """Train with a valid configuration. All checks are made while the cluster starts and the engine
    imports SGLang. announce: is given the configuration as it fits the machine, before the run."""
    from onpolicy.cluster.ray_session import begun
    from onpolicy.run.launch.early_engine import engine_begun

    with begun(config.cluster), engine_begun(config):
        from onpolicy.compat.light_imports import import_transformers

        import_transformers()
        from onpolicy.rewards.scorer import Scorer
        from onpolicy.run.launch.cluster_engines import on_cluster
        from onpolicy.run.launch.input_checks import fit_run
        from onpolicy.run.launch.inputs import read_inputs
        from onpolicy.run.loop import train_through_losses
        from onpolicy.run.run import Run

        config = fit_run(config)
        inputs = read_inputs(config, Scorer(config.reward))
        announce(config)
        with on_cluster(config, inputs.contract) as cluster:
            make_run = partial(
                Run, make_engines=cluster.make_engines, rollouter=rollouter, on_metrics=on_metrics
            )
            return train_through_losses(config, inputs, make_run)


@contextmanager
def _no_event_loop() -> Iterator[None]:
    """Set the loop of a notebook's thread aside, which waits for us and would forbid another."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


def with_rewards(config: TrainConfig, rewards: Sequence[Reward]) -> TrainConfig:
    """Return the configuration with these rewards in place of none. Raises ConfigError if it has any."""
    if config.reward.sources:
        raise ConfigError(
            f"rewards={list(rewards)}: the configuration has {', '.join(config.reward.sources)} already."
            " Give rewards in one of the two."
        )
    sources = [each if isinstance(each, str) else _path_of(each) for each in rewards]
    if len(sources) == 1 and not isinstance(rewards[0], str):
        return with_flags(config, {"custom_rm_path": sources[0]})
    return with_flags(config, {"rewards": tuple(f"{source}=1" for source in sources)})


def _path_of(function: Callable[..., Any]) -> str:
    """Return where worker processes find a function: in its module, or in a file that unpickles it.

    The file stays and has its digest for a name: the same function has the same path when a run is
    resumed, and another one does not, which the checkpoint's settings tell.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found = getattr(sys.modules.get(module or ""), name, None)
    if module not in (None, "__main__") and found is function:
        return f"{module}.{name}"
    import cloudpickle

    name = name.rpartition(".")[2]
    name = name if name.isidentifier() else "reward"
    text = f"import pickle\n\n{name} = pickle.loads({cloudpickle.dumps(function)!r})\n"
    file = CACHE / f"{xxhash.xxh3_128_hexdigest(text.encode())}.py"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write(file, text)
    return f"{file}:{name}"
