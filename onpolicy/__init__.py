"""onpolicy: reinforcement learning whose rollout and training agree to the last bit."""
