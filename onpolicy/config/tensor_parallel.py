"""The blocks of sums that tensor-parallel ranks share, from the degrees of both engines."""

from __future__ import annotations

from collections.abc import Mapping

from onpolicy.errors import ConfigError


def count_blocks(asked: int, degrees: Mapping[str, int], *, aligned: bool) -> int:
    """`asked`, or if that is 0 the largest of the tensor-parallel `degrees`, given by flag.

    Raises ConfigError for degrees and blocks that make no tree of sums under aligned operators, and
    for blocks that are asked for without them.
    """
    if not aligned:
        if asked:
            raise ConfigError(
                f"--row-parallel-blocks={asked}: without aligned operators each engine sums in an "
                "order of its own. Leave it out, or add --true-on-policy-mode."
            )
        return max(degrees.values())
    for flag, degree in degrees.items():
        if not _is_power_of_two(degree):
            raise ConfigError(
                f"{flag}={degree}: must be a power of two with --true-on-policy-mode, since sums over "
                "ranks are a binary tree there. Choose 1, 2, 4 or 8."
            )
    flag = max(degrees, key=lambda name: degrees[name])
    if asked and not (_is_power_of_two(asked) and asked >= degrees[flag]):
        raise ConfigError(
            f"--row-parallel-blocks={asked}: must be a power of two and at least {flag}="
            f"{degrees[flag]}. Choose such a number, or leave the flag out."
        )
    return asked or degrees[flag]


def _is_power_of_two(number: int) -> bool:
    return number > 0 and not number & (number - 1)
