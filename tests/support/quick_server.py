"""What importing this saves a forked server: a second of CPU time, and two of waiting.

- For each patch SGLang looks through all variables of all modules for what the patch replaces. Here
  it finds the same places in an index.
- SGLang waits a second before it asks itself for a first answer, and before each answer about its
  health. Here it waits a tenth of that.

Servers that tests start anew do as SGLang does.
"""

import asyncio
import time

from sglang.srt.entrypoints import http_server
from sglang.srt.plugins import hook_registry

from tests.support.bindings import bindings_of, is_indexed, rebind

_search = hook_registry._propagate_patch


def _find(original, wrapped, source):
    if not is_indexed(original):
        return _search(original, wrapped, source)
    places = [place for place in bindings_of(original) if place[0] is not source]
    rebind(places, wrapped)
    return len(places)


class _Impatient:
    """A module that can sleep, and sleeps less."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)

    def sleep(self, seconds):
        return self._module.sleep(seconds / 10)


hook_registry._propagate_patch = _find
http_server.time = _Impatient(time)
http_server.asyncio = _Impatient(asyncio)
