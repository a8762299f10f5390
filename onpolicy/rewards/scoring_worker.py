"""Code of a scoring process: rules, loaded once, whose results become numbers or a failure.

A user's rule that raises, exits, crashes or returns nonsense can end this process, but not the run.
It imports nothing heavy, since every process that ended is replaced by a new one.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from onpolicy.errors import ConfigError
from onpolicy.rewards import ANSWER, Failure, Numbers, load_rule
from onpolicy.rewards.numbers import each_of, numbers_or_failure
from onpolicy.rewards.peer_signatures import as_ours
from onpolicy.system.user_functions import describe, load_function

if TYPE_CHECKING:
    from onpolicy.types import Sample

_rules: dict[str, Callable[..., Any] | Failure] = {}


def serve(link: Connection, names: Sequence[str], paths: Sequence[str], flag: str) -> None:
    """Answer calls until the other end of `link` closes: the process's main loop. A call is
    (seconds, function, arguments). After `seconds` of this process's processor time SIGPROF ends
    the process: the kernel counts them, so neither a busy host nor a stopped process makes a call
    late, and a computation in C, which no Python signal handler interrupts, ends too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which closes the link
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # A daemon may have no children of its own, which a function may want.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    load(names, paths, flag)
    try:
        link.send("ready")
        while True:
            seconds, function, arguments = link.recv()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            result = function(*arguments)
            signal.setitimer(signal.ITIMER_PROF, 0)
            link.send(result)
    except (EOFError, OSError):
        return  # the run has closed its end, or is gone


def _end_with_the_run() -> None:
    """End this process when the run's is gone, whatever a function waits for."""
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)


def load(names: Sequence[str], paths: Sequence[str], flag: str) -> None:
    """Load rules and functions for later calls; `flag` names the functions in messages."""
    for name in names:
        _rules[name] = _with_answer(name)
    for path in paths:
        try:
            _rules[path] = _load_own(path, flag)
        except ConfigError as error:
            _rules[path] = Failure(reason=str(error), in_loading=True)


def _load_own(path: str, flag: str) -> Callable[..., Any]:
    function = as_ours(load_function(path, flag))
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{flag}={path}: is async. It is called in a worker process, for one sample at a time or "
            "for one group; make it a plain function."
        )
    return function


def _with_answer(name: str) -> Callable[[str, str], Numbers]:
    """Return the rule's score function, extended to report the compared text under "answer"."""
    rule = load_rule(name)

    def score(response: str, label: str) -> Numbers:
        result = rule.score(response, label)
        parts = result if isinstance(result, dict) else {"score": result}
        return {**parts, ANSWER: rule.answer(response)}

    return score


def score(rule: str, *arguments: Any) -> Numbers | Failure:
    """Return a rule's result: the reward under "score", and further numbers."""
    count = _num_sampled(arguments[0])
    result = _result(rule, *arguments)
    return result if isinstance(result, Failure) else numbers_or_failure(result, count)


def score_each(rule: str, given: Sequence[tuple[str, str]]) -> list[Numbers | Failure]:
    """Return a built-in rule's results for responses with their labels, in their order."""
    return [score(rule, response, label) for response, label in given]


def score_group(rule: str, samples: Sequence[Sample]) -> list[Numbers | Failure] | Failure:
    """Return a rule's results for all samples of a prompt, in their order."""
    counts = [_num_sampled(sample) for sample in samples]
    results = _result(rule, samples)
    if isinstance(results, Failure):
        return results
    each = each_of(results, len(counts))
    return each if isinstance(each, Failure) else [*map(numbers_or_failure, each, counts)]


def _num_sampled(given: Sample | str) -> int | None:
    """Return the number of sampled tokens, before a function can change them; None for a text."""
    return None if isinstance(given, str) else given.trajectory.num_sampled


def _result(name: str, *arguments: Any) -> Any:
    """Return the rule's raw result, or a Failure."""
    if name not in _rules:
        load([name], [], "")
    rule = _rules[name]
    if isinstance(rule, Failure):
        return rule
    try:
        return rule(*arguments)
    except BaseException as error:  # SystemExit too
        return Failure(reason=f"raised {describe(error)}", traceback=traceback.format_exc())
