"""Hugging Face models for both engines: loading, alignment, weight names."""
