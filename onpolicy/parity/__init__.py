"""Comparison of the two engines' log-probabilities, bit by bit."""

from onpolicy.parity.compare import (
    Mismatch,
    ParityCounts,
    compare_log_probs,
    k3,
    mismatches,
    ulp_distance,
)

__all__ = ["Mismatch", "ParityCounts", "compare_log_probs", "k3", "mismatches", "ulp_distance"]
