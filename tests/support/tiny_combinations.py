"""Combinations of the flags that decide the training of a tiny model."""

from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError
from tests.support.combinations import Combinations
from tests.support.policies_in_memory import SIZES
from tests.support.tiny import make_checkpoint
from tests.support.unstarted_run import changed

NOT_HERE = {
    "agent": "one turn is what is trained on here",
    "cluster": "one process",
    "distillation": "read with a teacher alone, a second checkpoint or a server",
    "engine": "engines in memory have no flags of SGLang's",
    "eval": "decides no weight",
    "megatron": "read by --train-backend megatron alone",
    "operators": "by the machine",
    "reward": "scored in memory",
    "output": "where a run writes",
    "sync": "how weights travel",
}
"""Groups that are left out, and why."""

NOT_THESE = {
    "num_rollout": "two steps",
    "seed": "any other is as good",
    "train_backend": "megatron needs a process of its own",
    "use_rollout_routing_replay": "the tiny model has no experts",
    "apply_chat_template": "prompts are made in memory",
    "reasoning_gym_size": "prompts are made in memory",
    "images": "the tiny model has no tower",
}


def make_base(directory):
    """Two aligned steps of a checkpoint that is made there."""
    checkpoint = make_checkpoint(directory / "checkpoint", "qwen3", **SIZES)
    return changed(
        TrainConfig(), hf_checkpoint=str(checkpoint), dtype="float32", rm_type="exact",
        prompt_data=("prompts.jsonl",), num_rollout=2, rollout_batch_size=2, n_samples_per_prompt=4,
        rollout_max_response_len=4, lr=1e-3, max_tokens_per_gpu=64, true_on_policy_mode=True,
        cpu_threads=1, weight_sync="disk", run_dir=str(directory / "run"),
    )  # fmt: skip


def combinations_of(base):
    """What the rules of a run take of its flags."""

    def refusal(row):
        try:
            validate(changed(base, **row))
        except ConfigError as error:
            return error
        return None

    def is_outside(flag):
        return flag.path[0] in NOT_HERE or flag.name in NOT_THESE

    return Combinations(base, refusal, is_outside)


def arguments_of(row):
    found = []
    for name, value in row.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            found.append(f"{flag}={value}")
    return found
