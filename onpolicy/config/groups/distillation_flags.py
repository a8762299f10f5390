"""The flags of distillation from a teacher's log-probabilities of the sampled tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import ReadBy
from onpolicy.config.groups.reward_flags import is_url
from onpolicy.config.kinds import Count, HeaderText, NonNegative
from onpolicy.config.rules import NO_RESULT, Against, Together, secret

HAS_TEACHER = ReadBy(
    "--teacher-checkpoint or --teacher-url", lambda run: run.teacher_checkpoint or run.teacher_url
)
AT_ONE = Against(
    lambda run: run.rollout_temperature != 1 and run.rollout_temperature,
    "with --rollout-temperature={found} the student samples from another distribution than its own, and "
    "the teacher's is of temperature 1",
    "Leave --rollout-temperature at 1.",
)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    teacher_checkpoint: Annotated[
        tuple[str, ...],
        Together(lambda run: run.teacher_checkpoint and not run.config.distillation.teachers,
            "--teacher-checkpoint={run.teacher_checkpoint}: give one directory; or with --teacher-key "
            "several NAME=DIR, each name once."),
        AT_ONE,
    ] = ()  # fmt: skip
    """On-policy distillation: checkpoint of a teacher with the same tokenizer. It scores the tokens that
    the policy sampled, and the reverse KL towards it is minimised. Give several teachers as NAME=DIR
    with --teacher-key."""

    teacher_url: Annotated[
        tuple[str, ...],
        Together(lambda run: run.teacher_url and not run.config.distillation.teacher_urls,
            "--teacher-url={run.teacher_url}: give one address; or with --teacher-key several "
            "NAME=URL, each name once. An address begins with http:// or https://."),
        Against(lambda run: run.teacher_checkpoint,
            "it stands beside --teacher-checkpoint={found}, and a run has teachers of one kind"),
        AT_ONE,
        Against(lambda run: (run.rollout_top_k, run.rollout_top_p, run.rollout_min_p) != (-1, 1, 0),
            "a server gives log-probabilities over the whole vocabulary, and with --rollout-top-k, "
            "--rollout-top-p or --rollout-min-p the student samples from a part of it",
            "Leave these out, or load the teacher with --teacher-checkpoint."),
        Against(lambda run: run.opd_loss == "full",
            "--opd-loss=full takes the whole vocabulary of each token, which no server sends",
            "Use --opd-loss=top-k or sampled, or load the teacher with --teacher-checkpoint."),
    ] = ()  # fmt: skip
    """URL of an SGLang server that is the teacher instead, as `onpolicy serve` prints it. Give several
    as NAME=URL with --teacher-key. It scores each rollout before the first optimizer step."""

    teacher_api_key: Annotated[
        HeaderText, secret("--teacher-api-key"),
        ReadBy("--teacher-url", lambda run: run.teacher_url), NO_RESULT,
    ] = ""  # fmt: skip
    """API key of --teacher-url, or @FILE to read it from a file."""

    teacher_key: Annotated[str, HAS_TEACHER] = ""
    """Field of a row that names the teacher of its samples."""

    opd_loss: Annotated[
        Literal["sampled", "top-k", "full"], HAS_TEACHER,
        Against(lambda run: (run.rollout_top_k, run.rollout_top_p, run.rollout_min_p) != (-1, 1, 0),
            "this is the KL over the whole vocabulary, and with --rollout-top-k, --rollout-top-p or "
            "--rollout-min-p the student samples from a part of it", "Leave these out."),
        Against(lambda run: run.train_backend == "megatron" and run.megatron_pp > 1,
            "with --megatron-pp={run.megatron_pp} only the last stage knows what the teacher says",
            "Leave --megatron-pp at 1, or use --opd-loss=sampled."),
    ] = "sampled"  # fmt: skip
    """How the reverse KL is computed. `sampled`: from the sampled token, and subtracted from its
    advantage. `full`: over the whole vocabulary. `top-k`: over the --opd-top-k tokens that the teacher
    finds most likely, with all others as one. full and top-k are terms of the loss with their own
    gradient."""

    opd_top_k: Annotated[
        Count,
        ReadBy("--opd-loss=top-k, --policy-loss=centered or --rs-rules seq_max_kl",
            lambda run: run.opd_loss == "top-k" or run.policy_loss == "centered"
                or run.config.fallback.may_bound_kl),
    ] = 64  # fmt: skip
    """Number of tokens for --opd-loss top-k, or of those that the engine returns with each token for
    --policy-loss centered and --rs-rules seq_max_kl, exact with the whole vocabulary's size."""

    opd_kl_coef: Annotated[
        NonNegative, HAS_TEACHER,
        Together(lambda run: (run.teacher_checkpoint or run.teacher_url) and not run.opd_kl_coef,
            "--opd-kl-coef=0.0: nothing would be learnt from the teacher. Raise it, or leave that "
            "out."),
    ] = 1.0  # fmt: skip
    """Coefficient of the reverse KL to the teacher."""

    opd_reward_coef: Annotated[
        NonNegative, HAS_TEACHER,
        Against(lambda run: not run.opd_reward_coef and (
                run.filter_equal_rewards or run.dynamic_sampling),
            "rewards are not learnt from, and --filter-equal-rewards and --dynamic-sampling leave out "
            "groups for theirs", "Leave these out."),
    ] = 1.0  # fmt: skip
    """Coefficient of the advantages from rewards, next to the teacher's. 0 trains on the teacher
    alone."""

    @property
    def teachers(self) -> dict[str, str]:
        """Return checkpoints by teacher name; a single teacher's name is empty. It is also empty if
        the flag is neither one directory nor, with --teacher-key, named ones."""
        return self._by_name(self.teacher_checkpoint)

    @property
    def teacher_urls(self) -> dict[str, str]:
        """Return server addresses by teacher name, as in `teachers`."""
        found = self._by_name(self.teacher_url)
        return found if all(map(is_url, found.values())) else {}

    @property
    def loss_top_k(self) -> int:
        """Return the number of a teacher's likeliest tokens in the loss; 0 if it uses all, or none."""
        return self.opd_top_k if self.opd_loss == "top-k" else 0

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.teachers, *self.teacher_urls)

    def _by_name(self, given: tuple[str, ...]) -> dict[str, str]:
        if not self.teacher_key:
            return {"": given[0]} if len(given) == 1 else {}
        named = [each.partition("=") for each in given]
        found = {name: source for name, _, source in named if name and source}
        return found if len(found) == len(given) else {}
