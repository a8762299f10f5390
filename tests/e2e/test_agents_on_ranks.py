"""Whole runs of agents have one hash on any number of engines and ranks, in either training engine."""

import pytest

from onpolicy.outputs.metrics import read_jsonl
from tests.e2e.test_gateway import TEMPLATE
from tests.e2e.test_other_ranks import OWN_SUMS
from tests.support.tiny import make_checkpoint
from tests.support.train_runs import finish, run_hash, start_train

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.runs]

FUNCTION = (
    "--custom-generate-function-path", "own_agent.act_by_tokens", "--rollout-max-context-len", "120",
)  # fmt: skip
GATEWAY = (
    "--custom-agent-function-path", "gateway_agent.chats", "--tool-call-parser", "pythonic"
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def trained(checkpoint, data, directory, agent, backend, number, in_ranks=""):
    """The hash of a run on so many engines and ranks, whose bits show in several micro-batches."""
    on = ("--rollout-num-engines", str(number), "--actor-num-ranks-per-node", str(number))
    bits = ("--dtype", "float32", "--max-tokens-per-gpu", "60", "--cpu-threads", "1")
    argv = (*agent, *on, *bits, "--train-backend", backend, "--num-rollout", "2")
    hashed = run_hash(finish(start_train(checkpoint, data, directory, *argv, in_ranks=in_ranks)))
    for step in read_jsonl(directory / "run" / "metrics.jsonl"):
        assert step["parity/num_mismatched_tokens"] == 0 < step["parity/num_compared_tokens"]
        assert step["rollout/num_failed_episodes"] == 0
        assert min(step["episodes/num_turns"], step["episodes/num_trajectories"]) >= 2
    return hashed


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("agent", [FUNCTION, GATEWAY], ids=["function", "gateway"])
def test_two_engines_and_two_ranks_train_an_agent_to_the_bits_of_one(
    checkpoint, data, tmp_path, agent, backend
):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    one, two = (trained(checkpoint, data, tmp_path / str(n), agent, backend, n) for n in (1, 2))
    assert one == two
    if (agent, backend) == (FUNCTION, "fsdp"):  # the control: sums of the engine's own
        assert trained(checkpoint, data, tmp_path / "own", agent, backend, 2, OWN_SUMS) != two
