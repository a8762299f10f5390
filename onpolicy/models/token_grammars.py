"""The tokens that a grammar allows next, by xgrammar, for the engine's sampler and the trainer.

The set of allowed tokens is a function of the grammar, the vocabulary, the stop tokens and the
previous tokens; it depends on no weights and no other sequence of the batch. So the trainer
computes it again and compares.
"""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onpolicy.config.groups import ModelConfig
from onpolicy.errors import in_one_line
from onpolicy.models.hf_config import parse_config
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.ops.kept_tokens import WHOLE, packed
from onpolicy.trajectory import Trajectory

SCHEMA_CHECK = "srt/constrained/json_schema_validation.py"
"""SGLang's list of what xgrammar reads in a schema and does not enforce; the file imports nothing."""

_LOCK = threading.Lock()


@lru_cache(1024)
def require_grammar(kind: str, text: str, stop_token_ids: tuple[int, ...]) -> None:
    """Raise ValueError for a grammar that cannot be parsed, enforced in full, or ended."""
    import xgrammar  # takes seconds

    if not stop_token_ids:
        raise ValueError(f"{kind}: no token ends an answer. Name some in --rollout-stop-token-ids.")
    try:
        if kind != "regex":
            _require_enforced(json.loads(text), kind)
        getattr(xgrammar.Grammar, f"from_{kind}")(text)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        why = in_one_line(error).partition(".cc:")[2].partition(": ")[2] or in_one_line(error)
        raise ValueError(
            f"{kind}={text!r:.200}: an answer cannot be held to it ({why}). Correct it or leave it out."
        ) from error


def _require_enforced(part: Any, keyword: object) -> None:
    """Raise ValueError for a schema, or a part of a structural tag, that is not enforced in full."""
    if keyword == "json_schema":
        _schema_check()(part)
    elif isinstance(part, (dict, list)):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            _require_enforced(value, key)


@cache
def _schema_check() -> Any:
    """Return SGLang's check of a schema, which raises ValueError, without the rest of SGLang."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ValueError("SGLang, which knows what is enforced, is not installed")
    file = spec.origin.replace("__init__.py", SCHEMA_CHECK)
    return runpy.run_path(file)["validate_xgrammar_json_schema"]


@cache
def _compiler(checkpoint: str, trusts: bool, stops: tuple[int, ...]) -> Any:
    """Return xgrammar's compiler, which is thread-safe and keeps what it compiled."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(
        load_tokenizer(checkpoint, trusts),
        vocab_size=parse_config(checkpoint, trusts).vocab_size,
        stop_token_ids=[*stops],
    )
    return xgrammar.GrammarCompiler(info)


class Matcher:
    """The position of an answer in a grammar, for a checkpoint's tokenizer.

    Raises ValueError as `require_grammar` does.
    """

    def __init__(self, checkpoint: str, trusts: bool, kind: str, text: str, stops: tuple[int, ...]):
        import xgrammar

        require_grammar(kind, text, stops)
        with _LOCK:  # one thread loads the tokenizer
            compiler = _compiler(checkpoint, trusts, stops)
        compiled = getattr(compiler, f"compile_{kind}")(text)
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._size = compiled.tokenizer_info.vocab_size
        self.has_ended: Callable[[], bool] = self._matcher.is_terminated
        """A function that returns whether a stop token was taken."""

    def allowed(self) -> Tensor:
        """Return the tokens that may come next, bool [V], while the answer has not ended.

        It is all False where the vocabulary cannot spell what the grammar needs.
        """
        bits = np.full((1, -(-self._size // 32)), -1, dtype=np.int32)
        self._matcher.fill_next_token_bitmask(torch.from_numpy(bits))
        found = np.unpackbits(bits.view(np.uint8), count=self._size, bitorder="little")
        return torch.from_numpy(found.astype(bool))

    def take(self, token: int) -> None:
        """Accept a token. Raises ValueError, and changes nothing, if it is not allowed."""
        if self.has_ended() or not self._matcher.accept_token(token):
            raise ValueError(f"token {token} is not allowed there by the grammar of the answer")


def allowed_sets(trajectories: Sequence[Trajectory], model: ModelConfig) -> list[bytes]:
    """Return the allowed set of each of the R sampled tokens, as `ops/kept_tokens.py` packs it; none
    at all without grammars.

    After the first token that its grammar does not allow the set is the whole vocabulary: that token
    was drawn from another set already.
    """
    sets, tokenizer = list[bytes](), (model.hf_checkpoint, model.trust_remote_code)
    for trajectory in trajectories:
        found = dict[int, bytes]()
        for span in trajectory.grammars:
            grammar = span.grammar
            matcher = Matcher(*tokenizer, grammar.kind, grammar.text, grammar.stop_token_ids)
            with suppress(ValueError):
                for place in range(span.start, span.end):
                    (found[place],) = packed(matcher.allowed()[None])
                    matcher.take(trajectory.token_ids[place])
        sets += [found.get(i, WHOLE) for i, sampled in enumerate(trajectory.sampled) if sampled]
    return sets if any(t.grammars for t in trajectories) else []
