"""What a run starts from: the checkpoint and the prompts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from onpolicy.config.groups.agents import is_of_verifiers
from onpolicy.config.rules import NO_RESULT, Together


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    hf_checkpoint: str = ""
    """Local directory with the Hugging Face checkpoint. Required."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of both engines. Master weights and gradient sums are float32 in any case."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckpointConfig):
    trust_remote_code: Annotated[bool, NO_RESULT] = False
    """Run Python code that comes with a checkpoint whose architecture transformers does not have."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    prompt_data: Annotated[
        str,
        Together(lambda run: not run.prompt_data and not is_of_verifiers(run),
            "--prompt-data is missing: a run needs it. Give a path."),
    ] = ""  # fmt: skip
    """Training prompts: a .jsonl or .parquet file. Required, but with --environment verifiers:NAME."""

    input_key: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages."""

    label_key: str = "label"
    """Field with the reference answer; dots reach into objects, as in reward_model.ground_truth."""

    apply_chat_template: bool = False
    """Turn prompts into chats with the tokenizer's template."""

    shuffle: bool = True
    """Visit the prompts in a new order in every epoch, fixed by --seed."""
