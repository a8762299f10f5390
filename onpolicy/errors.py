"""The errors that a user can meet, one class per kind of mistake.

Every message names the wrong setting (`name=value`), the rule that it breaks, and the remedy. Each
class also inherits the standard type that such a mistake raises elsewhere, so callers may catch either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onpolicy.types import ParityFindings

HOW_TO_INSTALL = (
    "With a GPU: pip install 'onpolicy[gpu]'. Without one: pip install 'onpolicy[cpu]', then "
    "pip install --no-deps sglang==0.5.23; in a checkout: make setup."
)


class OnPolicyError(Exception):
    """Base of every error that onpolicy raises on purpose."""


class ConfigError(OnPolicyError, ValueError):
    """A flag, a YAML key, a checkpoint or a data file that a run cannot start with."""


class ContractError(OnPolicyError, RuntimeError):
    """An engine or an operator that breaks the numerics contract."""


class ParityError(OnPolicyError, RuntimeError):
    """A sampled token that the trainer's policy does not confirm: its log-probability differs, its seed
    draws another token, or it was not compared."""

    findings: ParityFindings | None = None
    """Findings of the comparison in the training step that was not taken."""

    is_correctable: bool = True
    """Whether the fallback correction can repair it, since that weighs tokens by their
    log-probabilities."""


class EngineError(OnPolicyError, RuntimeError):
    """A rollout engine that failed, gave a malformed answer, or could not be restarted."""


class WeightSyncError(OnPolicyError, RuntimeError):
    """An engine whose weights differ, in any bit, from the ones that were pushed to it."""


class RewardError(OnPolicyError, RuntimeError):
    """A reward rule that is missing, or that fails on more samples than the run allows."""


class AgentError(OnPolicyError, RuntimeError):
    """An episode that did not finish, because its function or the process around it failed."""

    def __init__(self, message: str, *, reason: str):
        super().__init__(message)
        self.reason = reason
        """One of 'raised', 'context' (too many tokens), 'result' (no Episode), 'drift', 'hung' or
        'died' (its process)."""


class CheckpointError(OnPolicyError, OSError):
    """A checkpoint that could not be written completely or cannot be read back."""


class OutputError(OnPolicyError, OSError):
    """A file of the run directory that could not be written."""


class TrainingError(OnPolicyError, ArithmeticError):
    """An optimizer step that cannot be taken, for example because a gradient is not finite."""


class TrainerLostError(OnPolicyError, RuntimeError):
    """A rank of the trainer whose process is gone."""


class HostLostError(EngineError):
    """A lost host, on which its servers cannot be started again."""


_KEPT = "\n\t"

_COMMANDS = (
    *range(0x20), *range(0x7F, 0xA0),  # C0, DEL and C1
    0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A),
)  # fmt: skip
"""Characters that a terminal obeys instead of showing: control characters, and the Unicode characters
that change the direction of text or end a line."""

_VISIBLE = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in _COMMANDS
    if chr(code) not in _KEPT
}


def visible(text: str) -> str:
    """Escape the control characters of untrusted text but newline and tab (for example as \\x1b), so
    that a terminal only shows it."""
    return text.translate(_VISIBLE)


def in_one_line(error: BaseException, limit: int = 300) -> str:
    """Return another library's error message in one line, to be quoted in one of ours."""
    text = visible(" ".join(str(error).split()))
    return text if len(text) <= limit else f"{text[:limit]}..."
