"""docs/first_gpu.md says what GPUs must hold, and the sums made before a run say the same."""

import re
from pathlib import Path

import pytest
from transformers import Qwen3Config

from onpolicy.config import TrainConfig, groups
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.contract import AttentionShape, NumericsContract, OperatorShapes
from onpolicy.models.size import ModelSize
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.run.commands import verification as verify_inputs
from onpolicy.run.launch.memory import RunMemory, server_memory

PAGE = Path(__file__).parents[3] / "docs/first_gpu.md"
SEQUENCE = 2048

# Layers, hidden size, size of the MLP, heads, and whether embedding and head are one.
MODELS = {
    "Qwen3-0.6B": (28, 1024, 3072, 16, True), "Qwen3-1.7B": (28, 2048, 6144, 16, True),
    "Qwen3-4B": (36, 2560, 9728, 32, True), "Qwen3-8B": (36, 4096, 12288, 32, False),
}  # fmt: skip


def config_of(name):
    layers, hidden, intermediate, heads, tied = MODELS[name]
    return Qwen3Config(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        tie_word_embeddings=tied,
    )  # fmt: skip


def train_on(ranks):
    return TrainConfig(
        trainer=groups.TrainerConfig(activation_checkpointing=True),
        cluster=groups.ClusterConfig(actor_num_ranks_per_node=ranks),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_page_has_the_sums_of_the_memory_model(name, monkeypatch):
    monkeypatch.setattr(verify_inputs, "_bucket_mib", lambda path: 512)  # of a real checkpoint
    hf_config = config_of(name)
    size = ModelSize.of(hf_config)
    attention = AttentionShape(heads=32, kv_heads=8, head_dim=128, value_dim=128)
    shapes = OperatorShapes(linear=(), attention=(attention,), norm=(), vocab_size=size.vocab)
    contract = NumericsContract(backend="triton", device="cuda", dtype="bfloat16", shapes=shapes)

    def spec(longest):
        return EngineSpec(
            hf_checkpoint="", contract=contract, host="", api_key="", seed=0, num_threads=1,
            longest_sequence=longest, trust_remote_code=False, sglang_args=(),
        )  # fmt: skip

    longest = verify_inputs.LONGEST_PROMPT
    verify, scoring = (
        verify_inputs.make_train_config(VerifyConfig(step=step), longest) for step in (True, False)
    )
    numbers = [
        server_memory(spec(SEQUENCE), size, hf_config, 1).parts["weights"],
        *(
            RunMemory(c, hf_config, spec(longest + 64), size).trainer.bytes
            for c in (verify, scoring)
        ),
        *(RunMemory(train_on(n), hf_config, spec(SEQUENCE), size).trainer.bytes for n in (1, 8)),
    ]
    row = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    said = [float(cell) for cell in row[1].split("|")]
    assert said == [round(number / 2**30, 1) for number in numbers]
