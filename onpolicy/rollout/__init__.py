"""Rollout: prompts in, sampled token ids and their log-probabilities out."""
