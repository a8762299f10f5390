"""onpolicy: reinforcement learning whose rollout and training agree to the last bit."""

import os

# Without its strict mode MKL sums in another order for few rows on Intel CPUs (from AVX2 on). It asks
# once, before its first product; engines inherit the variable.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
