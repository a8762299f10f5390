"""What a process that computes asks of torch's libraries, each of which reads its variable once."""

from __future__ import annotations

import os

STRICT_SUMS = ("MKL_CBWR", "AUTO,STRICT")
"""Without its strict mode MKL sums in another order for few rows on Intel CPUs (from AVX2 on)."""

PATIENT_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
"""Threads that wait by spinning take the cores from the engines: 7 times slower on a busy machine."""


def prepare_process() -> None:
    """Ask for both where the environment asks for nothing else; children inherit it.

    To be called first where a process starts: OpenMP reads its variable when torch is imported, MKL
    before its first product.
    """
    for name, value in (STRICT_SUMS, PATIENT_THREADS):
        os.environ.setdefault(name, value)


def strict_sums_remedy() -> str:
    """What to do about MKL's mode in a process whose sums depend on the number of rows."""
    name, strict = STRICT_SUMS
    asked = os.environ.get(name)
    if asked is None:
        return (
            f"{name} is not set: let the process begin with onpolicy.compat.process.prepare_process(), "
            f"or export {name}={strict}."
        )
    return "" if asked == strict else f"{name}={asked}: unset it (onpolicy asks for {strict})."
