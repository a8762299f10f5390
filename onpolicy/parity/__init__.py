"""Comparison of the two engines' log-probabilities, bit by bit."""

from onpolicy.parity.compare import (
    Mismatch,
    ParityCounts,
    compare_log_probs,
    mismatches,
    ulp_distance,
)

__all__ = ["Mismatch", "ParityCounts", "compare_log_probs", "mismatches", "ulp_distance"]
