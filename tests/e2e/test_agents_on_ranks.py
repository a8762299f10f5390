"""Whole runs of agents have one hash on any number of engines and ranks, in either training engine."""

import pytest

from onpolicy.outputs.metrics import read_jsonl
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import finish, run_hash, start_train

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.runs]

FUNCTION = (
    "--custom-generate-function-path", "own_agent.act_by_tokens", "--rollout-max-context-len", "120",
)  # fmt: skip
WITHIN = (
    "--custom-generate-function-path", "own_agent.act_within", "--rollout-max-context-len", "120",
)  # fmt: skip
GATEWAY = (
    "--custom-agent-function-path", "gateway_agent.chats", "--tool-call-parser", "pythonic"
)  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def trained(checkpoint, data, directory, agent, backend, number, *more):
    """The hash of a run on so many engines and ranks, whose bits show in several micro-batches."""
    on = ("--rollout-num-engines", str(number), "--actor-num-ranks-per-node", str(number))
    bits = ("--dtype", "float32", "--max-tokens-per-gpu", "60", "--cpu-threads", "1")
    argv = (*agent, *on, *bits, "--train-backend", backend, "--num-rollout", "2", *more)
    hashed = run_hash(finish(start_train(checkpoint, data, directory, *argv)))
    for step in read_jsonl(directory / "run" / "metrics.jsonl"):
        assert step["parity/num_mismatched_tokens"] == 0 < step["parity/num_compared_tokens"]
        assert step["rollout/num_failed_episodes"] == 0
        assert min(step["episodes/num_turns"], step["episodes/num_trajectories"]) >= 2
    return hashed


@pytest.mark.parametrize(
    ("agent", "backend"),
    [(FUNCTION, "fsdp"), (GATEWAY, "megatron")],
    ids=["function", "gateway on Megatron"],
)
def test_two_engines_and_two_ranks_train_an_agent_to_the_bits_of_one(
    checkpoint, data, tmp_path, agent, backend
):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    one, two = (trained(checkpoint, data, tmp_path / str(n), agent, backend, n) for n in (1, 2))
    assert one == two


TENSOR_PARALLEL = {
    "engine": ("fsdp", 1, "--sglang-tp-size", "2"),
    "megatron": ("megatron", 2, "--megatron-tp", "2"),
    "context": ("megatron", 2, "--megatron-cp", "2"),
}
ANYTHING_GOES = """
import torch
from onpolicy.models.token_grammars import Matcher
allowed = Matcher.allowed
Matcher.allowed = lambda self: torch.ones_like(allowed(self))
"""


@pytest.mark.parametrize("where", TENSOR_PARALLEL)
def test_sets_of_grammars_are_the_same_where_ranks_share_a_sample(
    checkpoint, data, tmp_path, where
):
    backend, number, *flags = TENSOR_PARALLEL[where]
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    found = trained(checkpoint, data, tmp_path / "shared", WITHIN, backend, number, *flags)
    if where == "engine":
        alone = ("--row-parallel-blocks", "2")
        assert found == trained(checkpoint, data, tmp_path / "alone", WITHIN, "fsdp", 1, *alone)


def test_a_mask_that_a_megatron_rank_leaves_out_ends_the_run(checkpoint, data, tmp_path):
    pytest.importorskip("megatron.core")
    _, number, *flags = TENSOR_PARALLEL["megatron"]
    flags += ["--train-backend", "megatron", "--actor-num-ranks-per-node", str(number)]
    argv = (*WITHIN, *flags, "--dtype", "float32", "--cpu-threads", "1")
    process = start_train(checkpoint, data, tmp_path, *argv, in_ranks=ANYTHING_GOES)
    assert "keeps other" in finish(process, code=1)
