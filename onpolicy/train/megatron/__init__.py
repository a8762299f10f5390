"""Megatron-core as a training engine: its GPTModel, schedules and groups around our operators.

What decides bits is replaced where Megatron-core lets a specification or a subclass replace it;
the package itself is never edited. Modules here import Megatron-core, so ask `require_megatron`
(`make.py`) before the first of them.
"""
