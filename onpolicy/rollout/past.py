"""Replay of a resumed branch's earlier answers, and checks that the branch repeats itself."""

from __future__ import annotations

from dataclasses import replace

from onpolicy.grammar import Grammar
from onpolicy.rollout.failures import OtherTokensError
from onpolicy.rollout.turns import Ask, BranchRecord, Turns, UnderWay
from onpolicy.trajectory import FinishReason, Trajectory


def answer_as_before(branch: Turns, ask: Ask, past: BranchRecord) -> FinishReason | None:
    """Answer a call with the tokens sampled before; return why they ended, if they are all of the
    answer.

    Raises OtherTokensError if the call comes after other tokens than before.
    """
    _require_same(branch, past, ask.before)
    number, begins, reason = len(branch.answers), len(ask.before.token_ids), None
    if number < len(past.answers):
        end, reason = past.answers[number]
        branch.trajectory = replace(past.trajectory.until(end), finish_reason=reason)
    else:
        branch.past = None
        if begins < len(past.trajectory.token_ids):
            branch.trajectory = past.trajectory
    so_far = branch.trajectory
    if len(so_far.token_ids) > begins and not _is_within(so_far, begins, ask.params.grammar):
        raise _differs(branch)
    if not all(so_far.sampled[begins:]):
        raise _differs(branch)
    return reason


def _is_within(so_far: Trajectory, place: int, grammar: Grammar | None) -> bool:
    """Return whether the token at `place` was sampled under that grammar, or under none."""
    of_token = (g.grammar for g in so_far.grammars if g.start <= place < g.end)
    return next(of_token, None) == grammar


def require_past(episode: UnderWay) -> None:
    """Raise OtherTokensError unless an ended episode has come at least as far as before."""
    for key, past in episode.past.items():
        if (branch := episode.branches.get(key)) is None:
            raise episode.differs(f"{episode.name}: the rollouter makes no branch {key}, as before")
        if branch.past is not None:
            _require_same(branch, past, branch.trajectory)
        if len(branch.trajectory.token_ids) < len(past.trajectory.token_ids):
            raise _differs(branch)


def _require_same(branch: Turns, past: BranchRecord, so_far: Trajectory) -> None:
    """Raise OtherTokensError unless one trajectory is the beginning of the other."""
    before = past.trajectory
    length = min(len(before.token_ids), len(so_far.token_ids))
    same = before.token_ids[:length] == so_far.token_ids[:length]
    same = same and before.sampled[:length] == so_far.sampled[:length]
    if not (same and before.forks == so_far.forks):
        raise _differs(branch)


def _differs(branch: Turns) -> OtherTokensError:
    after = branch.answers[-1][0] if branch.answers else 0
    return branch.episode.differs(
        f"{branch.episode.name}: the rollouter gives other tokens than before after token {after}. "
        "What it gives must depend on its arguments, on what is sampled and on what it observes alone."
    )
