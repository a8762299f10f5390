"""The flags of `onpolicy explain`: the flags of `onpolicy verify`, and the case to explain."""

from dataclasses import dataclass

import tyro

from onpolicy.config import groups
from onpolicy.config.flags import also
from onpolicy.config.kinds import Count, Directory, Unasked
from onpolicy.config.rules import Against
from onpolicy.config.tools import VerifyConfig

NEEDS_RECORDS = Against(
    lambda run: True,
    "the server records what it computes, so it is started by this command",
    "Leave the flag out.",
)


@also(rollout_server_url=[NEEDS_RECORDS], lora_rank=[groups.NOT_MERGED])
@dataclass(frozen=True, kw_only=True)
class ExplainConfig(VerifyConfig):
    """Name the first operator and layer at which the two engines differ, and by how much.

    Runs the same tokens through a real SGLang server, as it serves, and through the trainer, as it
    trains, and records what every operator was given and made of it. Names the first that gives other
    bits for the same input, and runs it alone on that input, in the shape of either side. Exit code 0
    if no token's log-probability differs.
    """

    num_prompts: Count = 8
    """Prompts, of random lengths, sharing prefixes."""

    step: tyro.conf.Suppress[bool] = False
    """No step is taken."""

    max_new_tokens: Count = Unasked(24)
    """Tokens sampled for every prompt; if not given, at most half of the model's context."""

    case: str = ""
    """Replay the mismatch that a run left in this file (RUN_DIR/cases), in place of random prompts."""

    load: str = ""
    """Checkpoint of that run, or its --save directory: weights to replay it with, in place of
    --hf-checkpoint's."""

    json: str = ""
    """Also write the result into this file, every operator of every layer with it."""

    html: str = ""
    """Also write a page into this file: layers by operators, and the tokens by their difference. It
    needs nothing beside it and no network to be opened."""

    run_dir: Directory = "runs/explain"
    """Directory for the engines' logs and for what the server records."""
