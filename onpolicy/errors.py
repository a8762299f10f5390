"""The errors a user can meet, one class per kind of mistake.

Every message says what is wrong (`name=value`), the rule it breaks, and the remedy. Each class also
inherits the standard type that such a mistake raises elsewhere, so callers may catch either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onpolicy.types import ParityFindings


class OnPolicyError(Exception):
    """Base of every error that onpolicy raises on purpose."""


class ConfigError(OnPolicyError, ValueError):
    """A flag, a YAML key, a checkpoint or a data file that a run cannot start with."""


class ContractError(OnPolicyError, RuntimeError):
    """An engine or an operator that does not keep the numerics contract."""


class ParityError(OnPolicyError, RuntimeError):
    """A sampled token that is none of the trainer's own policy: another log-probability, or drawn
    otherwise than by its seed; or one that was not compared."""

    findings: ParityFindings | None = None
    """What the comparison of a training step found that was not taken."""

    is_correctable: bool = True
    """Whether the fallback correction can mend it, which weighs tokens by their log-probabilities."""


class EngineError(OnPolicyError, RuntimeError):
    """A rollout engine that failed, answered nonsense, or could not be restarted."""


class WeightSyncError(OnPolicyError, RuntimeError):
    """An engine whose weights are not, bit for bit, the ones that were pushed to it."""


class RewardError(OnPolicyError, RuntimeError):
    """A reward rule that is missing, or fails on more samples than the run lets pass."""


class AgentError(OnPolicyError, RuntimeError):
    """An episode that its function, or the process around that, did not bring to an end."""

    def __init__(self, message: str, *, reason: str):
        super().__init__(message)
        self.reason = reason
        """In a word: 'raised', 'context' (too many tokens), 'result' (no Episode), 'drift', 'hung' or
        'died' (its process)."""


class CheckpointError(OnPolicyError, OSError):
    """A checkpoint that could not be written completely, or cannot be read back."""


class OutputError(OnPolicyError, OSError):
    """A file of the run directory that could not be written."""


class TrainingError(OnPolicyError, ArithmeticError):
    """An optimizer step that cannot be taken, such as one with gradients that are not finite."""


class TrainerLostError(OnPolicyError, RuntimeError):
    """A rank of the trainer whose process is gone."""


class HostLostError(EngineError):
    """A host with servers that is gone, so that they cannot be started again there."""


_KEPT = "\n\t"

_COMMANDS = (
    *range(0x20), *range(0x7F, 0xA0),  # C0, DEL and C1
    0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A),
)  # fmt: skip
"""Characters that a terminal obeys in place of showing them: those that control it, and those that turn
the direction of text, or end its line, in Unicode."""

_VISIBLE = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in _COMMANDS
    if chr(code) not in _KEPT
}


def visible(text: str) -> str:
    """Return a text that others wrote so that a terminal only shows it: control characters but newline
    and tab become escapes, such as \\x1b."""
    return text.translate(_VISIBLE)


def in_one_line(error: BaseException, limit: int = 300) -> str:
    """Return what another library's error says, to be put into a message of ours."""
    text = visible(" ".join(str(error).split()))
    return text if len(text) <= limit else f"{text[:limit]}..."
