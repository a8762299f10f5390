"""Seeds that depend on what is sampled, and on no order of arrivals."""

from __future__ import annotations

import hashlib


def sampling_seed(*key: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part of `key` and on their order.

    Engines fall back to one fixed seed for requests without any, which makes all samples of a
    prompt the same; so every request gets its own.
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
