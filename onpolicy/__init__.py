"""onpolicy: reinforcement learning in which rollout and training agree to the last bit."""
