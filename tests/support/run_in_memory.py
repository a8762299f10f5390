"""Whole runs on engines in memory, with the run's own loop, files, checkpoints and governor."""

import json
import math
from functools import partial
from itertools import chain

from transformers import Qwen3Config

from onpolicy.config import TrainConfig
from onpolicy.outputs.meanings import BY_THE_CLOCK
from onpolicy.outputs.metrics import read_jsonl
from onpolicy.rollout.prompt_order import PromptSource, joined
from onpolicy.run.ladder import Ladder, first_rung
from onpolicy.run.launch.input_checks import read_replayed
from onpolicy.run.launch.inputs import EvalPrompts, Inputs
from onpolicy.run.loop import train_through_losses
from onpolicy.run.run import Run
from onpolicy.types import Prompt
from tests.support.engines_in_memory import Host
from tests.support.tiny import make_tokenizer
from tests.support.tiny_policy import ALIGNED, END, STOCK
from tests.support.trainer_in_memory import pair_maker
from tests.support.unstarted_run import changed

ROLLOUTS = 4
PROMPTS = [Prompt(index=i, prompt_ids=[i + 2, 9 - i], label="x", text="ab") for i in range(5)]
EVAL_SETS = {"": PROMPTS[:2], "hard": PROMPTS[3:]}
GOVERNED = {
    "true_on_policy_mode": False,
    "mismatch_governor": True,
    "governor_k3": 1e-12,
    "governor_rise_after": 1,
}
"""A governor that climbs at every rollout which differs at all."""


class Interrupted(Exception):
    """Ends a run between two of its steps."""


def interrupted_at(step, kind=Run):
    """That kind of run, which is interrupted before it trains on a rollout."""

    class InterruptedRun(kind):
        def train(self, groups, at):
            if at == step:
                raise Interrupted
            return super().train(groups, at)

    return InterruptedRun


def even_tokens(sample):
    """A reward that samples of one prompt differ in."""
    return sum(token % 2 == 0 for token in sample.response_ids) / len(sample.response_ids)


class ScorerInMemory:
    def __init__(self, reward):
        self.reward = reward

    def score(self, groups):
        num_unscored = 0.0
        for sample in chain.from_iterable(groups):
            reward = self.reward(sample)
            sample.has_failed = reward is None
            sample.reward = math.nan if reward is None else reward
            num_unscored += sample.has_failed
        return {"rollout/reward_timeouts": 0.0, "rollout/num_unscored": num_unscored}

    def start(self):
        pass

    def close(self):
        pass


def make_config(directory, **values):
    """Aligned, in `directory`, with other values of some flags."""
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    base = {
        "hf_checkpoint": str(checkpoint), "dtype": "float32", "num_rollout": ROLLOUTS,
        "rollout_batch_size": 3, "n_samples_per_prompt": 4, "rollout_max_response_len": 6, "lr": 0.5,
        "true_on_policy_mode": True, "weight_sync": "disk", "run_dir": str(directory / "run"),
    }  # fmt: skip
    return changed(TrainConfig(), **{**base, **values})


def make_inputs(config, eval_sets):
    prompts, parts = joined([PROMPTS[:2], PROMPTS[2:]], config.data.prompt_data_weights)
    return Inputs(
        hf_config=Qwen3Config(num_hidden_layers=1, hidden_size=8, vocab_size=16),
        contract=ALIGNED if first_rung(config) == "aligned" else STOCK,
        ladder=Ladder(config, STOCK, ALIGNED) if config.plan.is_governed else None,
        tokenizer=make_tokenizer(),
        prompts=PromptSource(prompts, config.seed, shuffle=True, parts=parts),
        eval_sets={name: _eval_set(config, name, x) for name, x in eval_sets.items()},
        stop_token_ids=(END,),
        replayed=read_replayed(config, PROMPTS),
    )


def _eval_set(config, name, prompts):
    """A set as --eval-config has it, or as the flags alone say."""
    sets = config.eval_sets or changed(config, eval_prompt_data=(name or "a", "a")).eval_sets
    return EvalPrompts(settings=sets[name or "a"], prompts=prompts)


def run_in_memory(
    directory,
    host=None,
    reward=even_tokens,
    make_run=Run,
    eval_sets=EVAL_SETS,
    make_scorer=None,
    **values,
):
    """What a run ends with. `make_scorer`: in place of `reward`. `values`: of the configuration."""
    config = make_config(directory, **values)
    make = partial(
        make_run,
        make_engines=pair_maker(host or Host()),
        make_scorer=make_scorer or (lambda config: ScorerInMemory(reward)),
    )
    return train_through_losses(config, make_inputs(config, eval_sets), make)


def records_of(directory):
    """What a run logged, less what depends on the time it took and on what was cached."""
    return [
        {name: value for name, value in record.items() if not name.startswith(BY_THE_CLOCK)}
        for record in read_jsonl(directory / "run" / "metrics.jsonl")
    ]


def samples_of(directory, name):
    """The lines of a samples file, without what a clock says of their turns."""
    file = directory / "run" / "samples" / f"{name}.jsonl"
    return [without_seconds(json.loads(line)) for line in file.read_text().splitlines()]


def without_seconds(record):
    for turn in record.get("turns", ()):
        turn.pop("seconds", None)
    return record
