"""Grammars (`regex`, `json_schema`) by the trainer's own functions, also on servers of tokens.

Diverges in stock SGLang: a server without a tokenizer has no grammars; the mask is applied to
logits before the sampler sees them, and is not reported; a request starts at the grammar's
beginning, so that an answer cannot go on in another request; and where the vocabulary cannot go on,
every logit is -inf. Here the sampler applies the mask as the first cut (`sampler.py`). A request
with `custom_params={"num_begun": n}` goes on after the last n tokens of its prompt. An answer ends
with one of the request's `stop_token_ids`, or the model's if it has none. SGLang's queue of
grammars that are being compiled stays.

Source: GrammarManager, sglang/srt/constrained/grammar_manager.py; SamplingBatchInfo,
sglang/srt/sampling/sampling_batch_info.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from onpolicy.models.grammars import Grammars, Matcher
from sglang_patches import registry

PROCESS = "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar"
READY = "sglang.srt.constrained.grammar_manager.GrammarManager.get_ready_grammar_requests"
MASK = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.update_regex_vocab_mask"

NUM_BEGUN = "num_begun"

_STUCK = (
    "the vocabulary has no token with which the text could go on as its grammar wants. Use another "
    "grammar."
)


def install() -> None:
    registry.hook(PROCESS, _process, "replace")
    registry.hook(READY, _begin_ready, "after")
    registry.hook(MASK, _no_mask, "replace")


def _no_mask(info: Any) -> None:
    """Set no mask: the sampler applies the grammars itself."""
    info.grammar_mask = None


def allowed(info: Any, logits: Tensor) -> Tensor | None:
    """Return the tokens that a batch's grammars allow for logits [B, V]: bool [B, V]; None without
    grammars."""
    masks = {i: g.allowed for i, g in enumerate(info.grammars or ()) if g and not g.is_over}
    if not masks:
        return None
    rows = torch.ones_like(logits, dtype=torch.bool)
    for row, mask in masks.items():
        rows[row] = mask.to(logits.device)
    return rows


def is_constrained(info: Any) -> list[bool]:
    """Return for each request of a batch whether it is within a grammar, [B]."""
    grammars = info.grammars or [None] * len(info)
    return [grammar is not None and not grammar.is_over for grammar in grammars]


def _process(manager: Any, req: Any) -> bool:
    """Begin a request's grammar, or queue it; return whether the request waits.

    Replaces SGLang's method; the key also holds the grammar's stop tokens.
    """
    params = req.sampling_params
    kinds = ("regex", "json_schema", "structural_tag")
    kind = next((kind for kind in kinds if getattr(params, kind) is not None), None)
    if kind is None:
        return False
    text = getattr(params, kind)
    if kind == "structural_tag":
        text = of_today(text)
    if getattr(req, "require_reasoning", False):
        req.set_finish_with_abort(
            f"{kind}: not available after reasoning, whose end the trainer does not see. Leave it out, "
            "or start the server without --sglang-reasoning-parser."
        )
        return False
    stops = params.stop_token_ids or _own_stops(manager, req)
    key = (kind, text, tuple(sorted(stops)))
    if manager.grammar_backend is None:
        manager.grammar_backend = _backend(manager)
    req.grammar, is_known = manager.grammar_backend.get_cached_or_future_value(key, False)
    if is_known:
        _begin(req)
        return False
    req.grammar_key = key
    manager.grammar_queue.append(req)
    return True


def _own_stops(manager: Any, req: Any) -> set[int]:
    """Return the tokens at which SGLang ends a response that asks for no others."""
    of_tokenizer = {req.tokenizer.eos_token_id} if req.tokenizer is not None else set()
    return (of_tokenizer - {None}) | (manager.scheduler.model_config.hf_eos_token_id or set())


def of_today(tag: str) -> str:
    """Return a structural tag in xgrammar's present form; SGLang writes some in an earlier one. A
    text in neither form is returned unchanged, and refused by the compiler."""
    try:
        said = json.loads(tag)
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each.get("schema") or {}},
                "end": each["end"],
            }
            for each in said["structures"]
        ]
        calls = {"type": "triggered_tags", "triggers": said["triggers"], "tags": tags}
        calls["at_least_one"] = bool(said.get("at_least_one"))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return tag
    return json.dumps({"type": "structural_tag", "format": calls})


def _begin_ready(ready: list[Any], *_: Any) -> list[Any]:
    for req in ready:
        _begin(req)
    return ready


def _begin(req: Any) -> None:
    """Advance a request's grammar over the part of the answer that its prompt holds."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if req.grammar is None or req.finished():
        return
    if isinstance(req.grammar, InvalidGrammarObject):
        req.set_finish_with_abort(req.grammar.error_message)
        return
    count = (req.sampling_params.custom_params or {}).get(NUM_BEGUN, 0)
    begun = list(req.origin_input_ids)[len(req.origin_input_ids) - count :]

    def give_up(why: str) -> None:
        req.to_finish = FINISH_ABORT(why, HTTPStatus.BAD_REQUEST, "BadRequestError")

    try:
        req.grammar.begin(begun, give_up)
    except ValueError as error:
        req.set_finish_with_abort(str(error))


def _backend(manager: Any) -> Any:
    from sglang.srt.constrained.base_grammar_backend import (
        BaseGrammarBackend,
        BaseGrammarObject,
        InvalidGrammarObject,
    )

    class GrammarOfRequest(BaseGrammarObject):
        """The position of a request in its grammar."""

        def __init__(self, make: Callable[[], Matcher]):
            super().__init__()
            self._make, self._matcher = make, make()
            self._give_up: Callable[[str], None] = lambda why: None
            self._look()

        def _look(self) -> None:
            self._is_stuck = False
            if not self._matcher.has_ended:
                self.allowed = self._matcher.allowed()
                self._is_stuck = not self.allowed.any()

        @property
        def is_over(self) -> bool:
            """Whether nothing that is sampled counts any more."""
            return self.finished or self._is_stuck or self._matcher.has_ended

        def begin(self, begun: list[int], give_up: Callable[[str], None]) -> None:
            """Advance over the beginning. Raises ValueError for an invalid one, or one that cannot
            go on."""
            self._give_up = give_up
            for token in begun:
                if not self._matcher.take(token):
                    raise ValueError(
                        f"{NUM_BEGUN}={len(begun)}: token {token} is not allowed there"
                    )
            self._look()
            if self._is_stuck:
                raise ValueError(_STUCK)

        def accept_token(self, token: int) -> None:
            """Advance over a sampled token. SGLang turns a ValueError into a server error."""
            if self._is_stuck:
                return
            if not self._matcher.take(token):
                raise ValueError(f"token {token} is not allowed there")
            self._look()
            if self._is_stuck:
                self._give_up(_STUCK)

        def is_terminated(self) -> bool:
            return self._matcher.has_ended

        def copy(self) -> GrammarOfRequest:
            return GrammarOfRequest(self._make)

    class Backend(BaseGrammarBackend):
        """SGLang's cache and threads around our compiler."""

        def __init__(self, grammars: Grammars):
            super().__init__()
            self._grammars = grammars

        def _init_value_dispatch(self, key: Any, *_: Any) -> BaseGrammarObject:
            try:
                return GrammarOfRequest(partial(self._grammars.matcher_of, *key))
            except ValueError as error:
                return InvalidGrammarObject(str(error))

    args, model = manager.server_args, manager.scheduler.model_config
    path = args.tokenizer_path or args.model_path
    return Backend(Grammars(path, model.vocab_size, args.trust_remote_code))
