"""Bytes of tokens: a token may be a part of a character, which becomes a replacement sign as text."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

ReadBytes = Callable[[Sequence[int]], list[bytes]]

_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
"""GPT-2's mapping between characters and bytes, in which byte-level vocabularies are written."""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The form of a byte in SentencePiece's vocabularies."""


def bytes_reader(tokenizer: PreTrainedTokenizerBase) -> ReadBytes:
    """Return a function that gives the bytes of tokens; joined, they are the UTF-8 of their text.

    It repeats the steps of the tokenizer's decoder before bytes become text: for byte-level
    vocabularies and for SentencePiece's with byte fallback. In others each token is its own text.
    """

    def decode(token_ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(token_ids), **options))

    read = _piece_reader(tokenizer)
    if read is None:
        return lambda token_ids: [decode([token]).encode() for token in token_ids]

    def read_all(token_ids: Sequence[int]) -> list[bytes]:
        pieces = [tokenizer.convert_ids_to_tokens(token) for token in token_ids]
        found = [read(str(piece)) if piece is not None else b"" for piece in pieces]
        return _without_spaces(
            found, _leading(b"".join(found)) - _leading(decode(token_ids).encode())
        )

    return read_all


def offsets(token_bytes: Iterable[bytes]) -> Iterator[int]:
    """Yield the index of the character in which each token begins."""
    decoder, count = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for part in token_bytes:
        yield count
        count += len(decoder.decode(part))


def _piece_reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes] | None:
    """Return the function from a vocabulary's entry to bytes, if the decoder's steps are known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = {step["type"] for step in steps}
    if kinds <= {"ByteLevel", "ByteFallback", "Fuse"} and "ByteLevel" in kinds:
        return _of_byte_level
    if not kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return None
    replaced = {
        step["pattern"]["String"]: step["content"]
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    }
    replaced |= {step["replacement"]: " " for step in steps if step["type"] == "Metaspace"}

    def of_pieces(piece: str) -> bytes:
        if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in replaced.items():
            piece = piece.replace(old, new)
        return piece.encode()

    return of_pieces


def _of_byte_level(piece: str) -> bytes:
    found = [_OF_CHARACTER.get(character) for character in piece]
    return piece.encode() if None in found else bytes(byte for byte in found if byte is not None)


def _leading(text: bytes) -> int:
    return len(text) - len(text.lstrip(b" "))


def _without_spaces(parts: list[bytes], count: int) -> list[bytes]:
    """Return the parts without the first spaces, which decoders drop where a text begins."""
    for i, part in enumerate(parts):
        dropped = min(max(count, 0), _leading(part))
        parts[i], count = part[dropped:], count - dropped
    return parts
