"""The flags of a run's checkpoint and prompts."""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy, above
from onpolicy.config.groups.agent_flags import TemplateOptions, has_agent, is_of_verifiers
from onpolicy.config.kinds import Count
from onpolicy.config.rules import BY_CONTENT, NO_RESULT, Against, Facts, Together

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    hf_checkpoint: str = ""
    """Directory with the Hugging Face checkpoint, or OWNER/NAME[@REVISION] of the hub. Required."""

    dtype: Dtype = "bfloat16"
    """Compute dtype of both engines. Master weights and gradient sums are always float32. In float16 the
    loss is scaled (docs/losses.md)."""


def _text_alone(run: Facts) -> str | None:
    """Return the first setting that was made for text alone."""
    said = vars(run)
    ranks = (f"{flag}={n}" for flag, n in run.plan.degrees.items() if n > 1)
    rounded = ("rollout_weight_format", "rollout_activation_format")
    asked = {
        "--train-backend=megatron": said.get("train_backend") == "megatron",
        "--advantage-estimator=gae": said.get("advantage_estimator") == "gae",
        "a teacher": said.get("teacher_checkpoint") or said.get("teacher_url"),
        **{
            f"--{name.replace('_', '-')}={said[name]}": said[name]
            for name in rounded
            if name in said
        },
    }
    return next(chain(ranks, (name for name, holds in asked.items() if holds)), None)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CheckpointConfig):
    trust_remote_code: Annotated[bool, NO_RESULT] = False
    """Run Python code that comes with the checkpoint, if transformers does not know its architecture."""

    images: Annotated[
        bool,
        Against(lambda run: not run.plan.starts_aligned or run.plan.is_governed,
            "stock engines do not compute images as the trainer does",
            "Add --true-on-policy-mode, or leave the flag out."),
        Against(_text_alone, "{found} was made for text, and is not tried with images"),
    ] = False  # fmt: skip
    """Load the checkpoint's vision tower, and read the images of rows and of agents' messages. By
    default the text part is trained alone, and a row with images is refused."""

    @property
    def tower_of(self) -> str | None:
        """Return the checkpoint whose vision tower is loaded, if one is."""
        return self.hf_checkpoint if self.images else None


PROCEDURAL = "reasoning-gym:"
"""What a source of --prompt-data begins with that is made, and not read."""


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
    """Number of problems to generate for each dataset of reasoning-gym. A larger number begins with the
    same problems."""

    input_key: str = "prompt"
    """Field of a row that holds the prompt: a string, or a list of chat messages."""

    label_key: str = "label"
    """Field of a row with the reference answer. Dots reach inside, as in reward_model.ground_truth."""

    apply_chat_template: bool = False
    """Turn prompts into chats with the tokenizer's chat template. By default prompts are plain text."""

    chat_template_kwargs: Annotated[
        TemplateOptions,
        ReadBy("--apply-chat-template or an agent",
            lambda run: run.apply_chat_template or has_agent(run)),
    ] = "{}"  # fmt: skip
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'. They apply
    to prompts and to everything that agents append. One that the template does not read is refused."""


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
    """Training prompts: one or more .jsonl, .json, .csv, .parquet or .arrow files, directories written
    by save_to_disk, OWNER/NAME[@REVISION]:[CONFIG:]SPLIT of the hub, or reasoning-gym:NAME[,NAME] for
    generated problems. Required, unless --environment is verifiers:NAME."""

    prompt_data_weights: Annotated[
        tuple[float, ...], above(0),
        Against(lambda run: len(run.prompt_data_weights) != len(run.prompt_data)
            and len(run.prompt_data),
            "there must be one for each of the {found} values of --prompt-data",
            "Give as many, or leave them out: then all prompts come equally often."),
    ] = ()  # fmt: skip
    """Sampling weights of several --prompt-data, one for each; every source has epochs of its own. By
    default all rows are visited as if they were in one file."""

    shuffle: bool = True
    """Visit the prompts in a new order in every epoch. --seed fixes the order."""

    curriculum: Annotated[
        Literal["", "failures", "learnability"],
        Against(lambda run: run.rollout_schedule == "free",
            "goes by what rollouts have shown before one is drawn, and with --rollout-schedule free the "
            "clock decides what that is"),
    ] = ""  # fmt: skip
    """Skip prompts by their measured pass rate p: `failures` visits a prompt with probability 1 - p
    (Kimi k1.5, arXiv 2501.12599), `learnability` with probability 4 p (1 - p) (arXiv 2502.12272). A
    prompt that was not measured yet is always visited (docs/data.md). By default no prompt is
    skipped."""

    curriculum_pass_reward: Annotated[float, BY_CURRICULUM] = 1.0
    """Smallest reward with which a response counts as passed."""

    @property
    def sources(self) -> str:
        """Return the value of --prompt-data, for messages."""
        return " ".join(self.prompt_data)
