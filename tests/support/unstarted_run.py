"""A run that can save and load: a trainer, and engines whose server is not started."""

from dataclasses import replace

from onpolicy.config import TrainConfig
from onpolicy.config.flags import with_flags
from onpolicy.models.hf_config import load_config
from onpolicy.outputs.totals import RunTotals
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.saving import RunState, digest_prompts, digest_sets
from onpolicy.training import distributed, make_trainer
from onpolicy.types import Prompt

PROMPTS = [Prompt(index=i, prompt_ids=[i + 2], label="x", text="a") for i in range(3)]
EVALUATIONS = digest_sets({"aime": ("8 samples", PROMPTS[:2])})


def make_config(checkpoint, directory, lora_rank=0, **output):
    """It saves under `directory` and resumes from there."""
    save = f"{directory}/save"
    output = {"save": save, "save_interval": 2, "load": save, **output}
    return changed(
        TrainConfig(), hf_checkpoint=str(checkpoint), dtype="float32", num_rollout=9,
        true_on_policy_mode=True, lora_rank=lora_rank, **output,
    )  # fmt: skip


def make_run(checkpoint, directory, **output):
    distributed.init_process_group()
    config = make_config(checkpoint, directory, **output)
    hf_config = load_config(str(checkpoint))
    contract = contract_for(config, hf_config, aligned=True)
    engines = EnginePair(config, hf_config, contract, directory)
    engines.trainer = make_trainer(config, contract, 1)
    return config, engines


def state_after(rollouts_done):
    totals = RunTotals(first_reward=0.25, last_reward=0.5, num_compared_tokens=90)
    return RunState(
        rollouts_done=rollouts_done,
        run_hash="hash",
        totals=totals,
        governor={},
        learning_rate={"steps_taken": rollouts_done, "length_decay": {}},
        prompts=digest_prompts(PROMPTS),
        evaluations=EVALUATIONS,
    )


def changed(config, **values):
    """The configuration with other values of some flags, whatever their groups, or of sglang_args."""
    sglang_args = values.pop("sglang_args", config.sglang_args)
    return replace(with_flags(config, values), sglang_args=sglang_args)
