"""Grammars (`regex`, `json_schema`) by the trainer's own functions, also on servers of tokens.

Diverges in stock SGLang: a server without a tokenizer has no grammars; the mask is applied to
logits before the sampler sees them, and is not reported; an answer cannot go on in another request;
and where the vocabulary cannot go on, every logit is -inf. Here the sampler applies the mask as the
first cut (`engine_sampler.py`). A request with `custom_params={"num_begun": n}` goes on after the last
n tokens of its prompt. An answer ends with one of the request's `stop_token_ids`, or the model's.

Source: GrammarManager, sglang/srt/constrained/grammar_manager.py; SamplingBatchInfo,
sglang/srt/sampling/sampling_batch_info.py.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onpolicy.models.token_grammars import Matcher
from sglang_patches import registry

PROCESS = "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar"
MASK = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.update_regex_vocab_mask"


STUCK = "no token of the vocabulary can follow within the grammar. Use another."


def install() -> None:
    registry.hook(PROCESS, _process, "replace")
    registry.hook(MASK, _no_mask, "replace")


def _no_mask(info: Any) -> None:
    """Set no mask: the sampler applies the grammars itself."""
    info.grammar_mask = None


def held(info: Any) -> dict[int, Tensor]:
    """Return the tokens that grammars allow, bool [V], by the rows of a batch that are within one."""
    positions = {i: g for i, g in enumerate(info.grammars or ()) if g and not g.finished}
    return {i: g.allowed for i, g in positions.items() if g.allowed is not None}


def allowed(info: Any, logits: Tensor) -> Tensor | None:
    """Return the tokens that grammars allow for logits [B, V]: bool [B, V]; None without any."""
    if not (masks := held(info)):
        return None
    rows = torch.ones_like(logits, dtype=torch.bool)
    rows[[*masks]] = torch.stack([*masks.values()]).to(logits.device)
    return rows


def _process(manager: Any, req: Any) -> bool:
    """Queue a request with a grammar, as SGLang's method does; return whether it waits.

    xgrammar's compiler keeps what it compiled, so SGLang's cache is left out.
    """
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend

    kinds = ("regex", "json_schema", "structural_tag")
    kind = next((kind for kind in kinds if getattr(req.sampling_params, kind) is not None), None)
    if kind is None:
        return False
    if getattr(req, "require_reasoning", False):
        req.set_finish_with_abort(
            f"{kind}: not available after reasoning, whose end the trainer does not see. Leave it out, "
            "or start the server without --sglang-reasoning-parser."
        )
        return False
    manager.grammar_backend = manager.grammar_backend or BaseGrammarBackend()
    req.grammar = manager.grammar_backend.executor.submit(_begun, manager, req, kind)
    req.grammar_key = (kind,)
    manager.grammar_queue.append(req)
    return True


def _begun(manager: Any, req: Any, kind: str) -> Any:
    """Return the position of a request in its grammar, after what its prompt holds of the answer."""
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    args, params = manager.server_args, req.sampling_params
    text, count = getattr(params, kind), (params.custom_params or {}).get("num_begun", 0)
    own_stops = {getattr(req.tokenizer, "eos_token_id", None), *(req.eos_token_ids or ())} - {None}
    stops, ids = tuple(sorted(params.stop_token_ids or own_stops)), [*req.origin_input_ids]
    try:
        if type(count) is not int or not 0 <= count < len(ids):
            raise ValueError(
                f"num_begun={count!r}: must be an integer from 0 to {len(ids) - 1}. Correct it."
            )
        text = of_today(text) if kind == "structural_tag" else text
        matcher = Matcher(args.model_path, args.trust_remote_code, kind, text, stops)
        return _position_class()(matcher, ids[len(ids) - count :], req)
    except ValueError as error:
        return InvalidGrammarObject(str(error))


def of_today(tag: str) -> str:
    """Return a structural tag in xgrammar's present form; SGLang writes some in an earlier one. A
    text in neither form is returned unchanged, and refused by the compiler."""
    from xgrammar import StructuralTag, StructuralTagItem

    try:
        said = json.loads(tag)
        items = [
            StructuralTagItem(begin=each["begin"], schema=each.get("schema") or {}, end=each["end"])
            for each in said["structures"]
        ]
        found = StructuralTag.from_legacy_structural_tag(items, said["triggers"]).model_dump()
        found["format"]["at_least_one"] = bool(said.get("at_least_one"))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return tag
    return json.dumps(found)


@cache
def _position_class() -> type:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    class Position(BaseGrammarObject):
        """The position of a request in its grammar. SGLang turns a ValueError into a server error."""

        def __init__(self, matcher: Matcher, begun: list[int], req: Any):
            super().__init__()
            self._matcher, self._req = matcher, req
            try:
                for token in begun:
                    matcher.take(token)
            except ValueError as error:
                raise ValueError(f"num_begun={len(begun)}: {error}") from error
            self._look()

        def _look(self) -> None:
            """Find the allowed tokens, bool [V]; None if nothing that is sampled counts any more."""
            self.allowed = None if self.is_terminated() else self._matcher.allowed()
            if self.allowed is not None and not self.allowed.any():
                self._req.to_finish = FINISH_ABORT(STUCK, 400, "BadRequestError")
                self.allowed = None

        def accept_token(self, token: int) -> None:
            if self.allowed is not None:
                self._matcher.take(token)
                self._look()

        def is_terminated(self) -> bool:
            return self._matcher.has_ended()

    return Position
