"""What the plug-in asks of SGLang when a model has been loaded."""

from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context

from sglang_patches.model import longest_prefill


@pytest.mark.parametrize(("chunk", "longest"), [(8192, 8192), (-1, 16384), (None, 16384)])
def test_the_longest_prefill_is_what_sglang_resolved(monkeypatch, chunk, longest):
    resolved = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: resolved)
    assert longest_prefill() == longest
