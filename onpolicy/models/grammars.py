"""The tokens that a grammar allows next, by xgrammar, for the engine's sampler and the trainer.

The set of allowed tokens is a function of the grammar, the vocabulary, the stop tokens and the
previous tokens; it depends on no weights and no other sequence of the batch. So the trainer
computes it again and compares.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from onpolicy.contract import NumericsContract
from onpolicy.errors import in_one_line
from onpolicy.grammar import Grammar, GrammarKind
from onpolicy.models.json_schemas import require_enforced, require_tag_enforced
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.ops.kept_tokens import WHOLE, packed
from onpolicy.trajectory import Trajectory

if TYPE_CHECKING:  # its import takes seconds
    import xgrammar


def require_held(grammar: Grammar, contract: NumericsContract) -> None:
    """Raise ValueError unless engines under the contract can hold an answer to the grammar."""
    if not contract.is_aligned:
        raise ValueError(
            f"{grammar.kind}: needs --true-on-policy-mode, where engines say what a token was drawn "
            "from. Leave it out, or turn the mode on."
        )
    require_grammar(grammar)


def require_grammar(grammar: Grammar) -> None:
    """Raise ValueError for a grammar that cannot be parsed, enforced in full, or ended."""
    import xgrammar

    if not grammar.stop_token_ids:
        raise ValueError(
            f"{grammar.kind}: an answer ends with a stop token, and there is none. Name some in "
            "--rollout-stop-token-ids."
        )
    try:
        if grammar.kind == "regex":
            xgrammar.Grammar.from_regex(grammar.text)
        elif grammar.kind == "structural_tag":
            require_tag_enforced(json.loads(grammar.text))
            xgrammar.Grammar.from_structural_tag(grammar.text)
        else:
            require_enforced(json.loads(grammar.text))
            xgrammar.Grammar.from_json_schema(grammar.text)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        why = in_one_line(error).partition(".cc:")[2].partition(": ")[2] or in_one_line(error)
        raise ValueError(
            f"{grammar.kind}={grammar.text!r:.200}: an answer cannot be held to it ({why}). Correct it, "
            "or leave that out."
        ) from error


class Matcher:
    """The state of an answer within a grammar, token by token."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int):
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size

    @property
    def has_ended(self) -> bool:
        """Return whether a stop token was taken."""
        return bool(self._matcher.is_terminated())

    def allowed(self) -> Tensor:
        """Return the tokens that may come next, bool [V], while the answer has not ended.

        It is all False where the vocabulary cannot spell what the grammar needs.
        """
        self._bits.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self._vocab_size].astype(bool))

    def take(self, token: int) -> bool:
        """Accept a token; return False and change nothing if it is not allowed."""
        return not self.has_ended and bool(self._matcher.accept_token(token))


class Grammars:
    """A compiler of grammars for a checkpoint's tokenizer. It is thread-safe."""

    def __init__(self, checkpoint: str, vocab_size: int, trust_remote_code: bool = False):
        self._checkpoint, self._trusts, self._vocab_size = checkpoint, trust_remote_code, vocab_size
        self._compilers: dict[tuple[int, ...], xgrammar.GrammarCompiler] = {}
        self._lock = threading.Lock()

    def matcher_of(self, kind: GrammarKind, text: str, stop_token_ids: tuple[int, ...]) -> Matcher:
        """Return `matcher` for the fields of a grammar."""
        return self.matcher(Grammar(kind=kind, text=text, stop_token_ids=stop_token_ids))

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return the matcher of an answer that has not begun.

        Raise ValueError as `require_grammar` does.
        """
        require_grammar(grammar)
        compiler = self._compiler(grammar.stop_token_ids)
        if grammar.kind == "regex":
            return Matcher(compiler.compile_regex(grammar.text), self._vocab_size)
        if grammar.kind == "structural_tag":
            return Matcher(compiler.compile_structural_tag(grammar.text), self._vocab_size)
        return Matcher(compiler.compile_json_schema(grammar.text), self._vocab_size)

    def _compiler(self, stops: tuple[int, ...]) -> xgrammar.GrammarCompiler:
        import xgrammar

        with self._lock:
            if stops not in self._compilers:
                info = xgrammar.TokenizerInfo.from_huggingface(
                    load_tokenizer(self._checkpoint, self._trusts),
                    vocab_size=self._vocab_size,
                    stop_token_ids=[*stops],
                )
                self._compilers[stops] = xgrammar.GrammarCompiler(info)
            return self._compilers[stops]

    def sets(self, trajectory: Trajectory) -> list[bytes]:
        """Return the allowed set of each of the R sampled tokens, as `ops/kept_tokens.py` packs it.

        From the first token that its grammar does not allow on, the set is the whole vocabulary:
        that token was drawn from another set already.
        """
        found = dict[int, bytes]()
        for span in trajectory.grammars:
            matcher = self.matcher(span.grammar)
            for place in range(span.start, span.end):
                (found[place],) = packed(matcher.allowed()[None])
                if not matcher.take(trajectory.token_ids[place]):
                    break
        return [found.get(i, WHOLE) for i, sampled in enumerate(trajectory.sampled) if sampled]
