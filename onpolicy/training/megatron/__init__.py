"""Megatron-core as a training engine: its GPTModel, schedules and groups, with our operators.

Code that decides bits is replaced where Megatron-core lets a specification or a subclass replace it;
the package itself is never edited. Modules here import Megatron-core, so call `require_megatron`
(`make.py`) before importing the first of them.
"""
