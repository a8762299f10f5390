"""The flags of `onpolicy explain`: those of `onpolicy verify`, and what is to be found out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from fallback_correction.ranges import ReadBy, Rule
from onpolicy.config import groups
from onpolicy.config.flags import also
from onpolicy.config.kinds import Count, CountOrZero, Directory, Unasked
from onpolicy.config.rules import Against, Facts, Together
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.tools import VerifyConfig

NO_ADAPTERS = "stock engines have no adapters"
SEVERAL_PROMPTS = "an interval needs the sequences of several prompts"


def _not_attributed(run: Facts) -> str | None:
    """The first flag that --attribution contradicts, and why."""
    if not run.attribution:
        return None
    rules = _not_shared_out(run) if run.attribution == "operators" else _fixed_contract(run)
    both = (
        (f"--num-prompts={run.num_prompts}", run.num_prompts < 2, SEVERAL_PROMPTS),
        (f"--lora-rank={run.lora_rank}", run.lora_rank, NO_ADAPTERS),
    )
    found = (
        f"{flag} with --attribution={run.attribution}: {rule}"
        for flag, is_given, rule in (*rules, *both)
        if is_given
    )
    return next(found, None)


def _fixed_contract(run: Facts) -> Iterator[tuple[str, object, str]]:
    """(flag, whether it is given, rule) of contracts that go from stock to aligned."""
    degree = tensor_parallel_size(run.sglang_args)
    own = "it has contracts and prompts of its own"
    yield f"--align={run.align}", run.align, own
    yield "--no-true-on-policy-mode", not run.true_on_policy_mode, own
    yield f"--case={run.case}", run.case, own
    rule = "only the modules of fsdp can be aligned in part"
    yield f"--train-backend={run.train_backend}", run.train_backend != "fsdp", rule
    yield (
        f"--sglang-tp-size={degree}",
        degree > 1,
        "only an engine of one rank can be aligned in part",
    )


def _not_shared_out(run: Facts) -> Iterator[tuple[str, object, str]]:
    """(flag, whether it is given, rule) of engines as they are, all of whose rows are wanted."""
    yield f"--case={run.case}", run.case, SEVERAL_PROMPTS
    yield f"--align={run.align}", run.align, "there the server records the aligned kinds alone"


FROM_STOCK = ReadBy(
    "--attribution kinds or layers", lambda run: run.attribution in ("kinds", "layers")
)
"""What goes from stock engines to aligned ones."""

SEVERAL_ORDERS = Rule(lambda n: n != 1, "one order tells no error. Give 2 at least, or 0.")

NEEDS_RECORDS = Against(
    lambda run: True,
    "the server records what it computes, so it is started by this command",
    "Leave the flag out.",
)


@also(rollout_server_url=[NEEDS_RECORDS], lora_rank=[groups.NOT_MERGED])
@dataclass(frozen=True, kw_only=True)
class ExplainConfig(VerifyConfig):
    """Which operator makes the two engines differ, in which layer, and by how much?

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

    attribution: Annotated[
        Literal["kinds", "layers", "operators"] | None,
        Together(_not_attributed, "{found}. Leave one of the two out."),
    ] = None
    """Measure instead how much of the mismatch each kind of operator, or each decoder layer, causes: the
    same tokens with all aligned, with none, with each alone, and with all but each. Starts a server for
    every row. operators: share out the mismatch of the engines as they are among all operators, in nats,
    with intervals; one server."""

    orders: Annotated[CountOrZero, SEVERAL_ORDERS, FROM_STOCK] = 0
    """Also share out the k3 of stock engines among kinds or layers, so that the shares add up: by what
    it loses when they are aligned one after another, in this many random orders and their reverses. For
    n parts an order takes up to 2 (n - 3) servers more."""

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
