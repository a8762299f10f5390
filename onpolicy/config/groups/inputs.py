"""The flags of a run's checkpoint and prompts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy, above, at_least, at_most
from onpolicy.config.groups.agents import TemplateOptions, has_agent, is_of_verifiers
from onpolicy.config.kinds import Count
from onpolicy.config.rules import BY_CONTENT, NO_RESULT, Against, Facts, Together


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


PROCEDURAL = "reasoning-gym:"
"""What a source of --prompt-data begins with that is made, and not read."""


def _num_weights(run: Facts) -> object:
    """Return the number of sources, if the number of weights differs."""
    return len(run.prompt_data_weights) != len(run.prompt_data) and len(run.prompt_data)


def says_rewards(run: Facts) -> bool:
    """Return whether all prompts bring the rule that scores them."""
    return bool(run.prompt_data) and all(x.startswith(PROCEDURAL) for x in run.prompt_data)


BY_TEMPLATE = ReadBy("--apply-chat-template", lambda run: run.apply_chat_template)
BY_PROCEDURAL = ReadBy(
    "--prompt-data reasoning-gym:NAME or an evaluation set of it",
    lambda run: any(
        x.startswith(PROCEDURAL)
        for x in (*run.prompt_data, *(each.path for each in run.config.eval_sets.values()))
    ),
)
BY_CURRICULUM = ReadBy("--curriculum", lambda run: run.curriculum)


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    reasoning_gym_size: Annotated[Count, BY_PROCEDURAL] = 1000
    """Problems of each dataset of reasoning-gym; more of them begin with the same."""

    input_key: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages."""

    label_key: str = "label"
    """Field with the reference answer; dots reach into objects, as in reward_model.ground_truth."""

    tool_key: Annotated[str, BY_TEMPLATE] = "tools"
    """Field with the tools that a row's chat template is given, if the row has it: JSON schemas of
    functions as OpenAI has them, or their JSON as text."""

    apply_chat_template: bool = False
    """Turn prompts into chats with the tokenizer's template."""

    chat_template_kwargs: Annotated[
        TemplateOptions,
        ReadBy("--apply-chat-template or an agent",
            lambda run: run.apply_chat_template or has_agent(run)),
    ] = "{}"  # fmt: skip
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}', for prompts
    and for all that agents add. One that the template does not read is refused."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(RowsConfig):
    prompt_data: Annotated[
        tuple[str, ...],
        BY_CONTENT,
        Together(lambda run: run.num_rollout and not (any(run.prompt_data) or is_of_verifiers(run)),
            "--prompt-data is missing: a run needs it. Give a path."),
        Together(lambda run: "" in run.prompt_data[1:] and " ".join(map(repr, run.prompt_data)),
            "--prompt-data={found}: one of its paths is empty. Give a path, or leave it out."),
    ] = ()  # fmt: skip
    """Training prompts: a .jsonl, .json, .csv, .parquet or .arrow file, a directory of save_to_disk, or
    reasoning-gym:NAME[,NAME] for problems that this package makes and scores; or several of these.
    Required, but with --environment verifiers:NAME."""

    prompt_data_weights: Annotated[
        tuple[float, ...], above(0),
        Against(_num_weights, "there must be one for each of the {found} values of --prompt-data",
            "Give as many, or leave them out: then all prompts come equally often."),
    ] = ()  # fmt: skip
    """Shares of several --prompt-data in what is visited, in proportion, each with epochs of its own. If
    not given, all are visited as if they stood in one file."""

    shuffle: bool = True
    """Visit the prompts in a new order in every epoch, fixed by --seed."""

    curriculum: Annotated[
        Literal["", "failures", "learnability"],
        Against(lambda run: run.rollout_schedule == "free",
            "goes by what rollouts have shown before one is drawn, and with --rollout-schedule free the "
            "clock decides what that is"),
    ] = ""  # fmt: skip
    """Pass over prompts by their measured pass rate p: failures visits one with probability 1 - p
    (Kimi k1.5, arXiv 2501.12599), learnability with 4 p (1 - p) (arXiv 2502.12272); those that were not
    measured always (docs/data.md)."""

    curriculum_window: Annotated[Count, BY_CURRICULUM] = 1
    """Visits of a prompt, the last ones, that its pass rate is the mean of."""

    curriculum_floor: Annotated[float, at_least(0.001), at_most(1), BY_CURRICULUM] = 0.05
    """Smallest probability of a visit, so that no prompt is left out for good."""

    curriculum_pass_reward: Annotated[float, BY_CURRICULUM] = 1.0
    """A response passes from this reward on."""

    @property
    def sources(self) -> str:
        """Return the value of --prompt-data, for messages."""
        return " ".join(self.prompt_data)
