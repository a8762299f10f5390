"""Prefill of a prefix shared by waiting requests, once, by the first of them.

Stock SGLang looks up a request's prefix in its cache when it takes the request into a batch, and
puts all waiting requests into one batch as long as there is room: n samples of one prompt that are
sent at once are prefilled n times. (Its policy `lpm` moves such requests to the end of the queue,
from where they come into the same batch.) Here a request is left in the queue for a pass while one
before it computes at least LEAST tokens of its prefix that are not in the cache yet. No bit depends
on it, since the aligned attention gives a cached prefix and a computed one the same rows. Of a model
with recurrent layers none is left: the cache has no state in the middle of a computed prefix.

Source: sglang/srt/managers/scheduler.py. Can go when SGLang's scheduler leaves them in the queue.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from sglang_patches import registry

TARGET = "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw"

WORD = 4
"""Bytes of a token in `words_of`."""

LEAST = 32
"""The tokens from which a prefill costs more than a pass of waiting, as in SGLang's `lpm`."""


def install() -> None:
    registry.hook(TARGET, _leave_followers, "around")


def _leave_followers(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Form a batch from the requests in the queue that wait for no other's prefix."""
    queue, cache = scheduler.waiting_queue, scheduler.tree_cache
    running = kwargs.get("running_batch", scheduler.running_batch)
    shares_none = getattr(cache, "disable", True) or cache.supports_mamba()
    if shares_none or not queue or _takes_none(scheduler, running):
        return original(scheduler, *args, **kwargs)
    last = scheduler.last_batch
    under_way = last.reqs if last is not None and last.forward_mode.is_extend() else []
    leaders = Leaders(scheduler.page_size)
    for request in filter(None, (scheduler.chunked_req, *under_way)):
        leaders.add(kept_words(request), _key(request))
    waits = {
        request
        for request in queue
        if leaders.compute(kept_words(request), _key(request), partial(_num_cached, cache, request))
    }
    scheduler.waiting_queue = [request for request in queue if request not in waits]
    result = original(scheduler, *args, **kwargs)
    # Keep the order of the queue, with requests that SGLang added at its end.
    left = dict.fromkeys(scheduler.waiting_queue)
    still = [request for request in queue if request in waits or request in left]
    scheduler.waiting_queue = list(dict.fromkeys(chain(still, left)))
    return result


def _takes_none(scheduler: Any, running: Any) -> bool:
    """Return whether SGLang takes none of the waiting requests in this pass, whatever they are."""
    looks_again = scheduler.enable_priority_preemption or scheduler.is_hybrid_swa
    is_full = running.batch_is_full and not running.is_empty() and not looks_again
    return is_full and scheduler.chunked_req is None


class Leaders:
    """Requests whose prefixes will be in the cache after the next passes, by cache key."""

    def __init__(self, page_size: int = 1):
        self._page_size = page_size
        self._of = defaultdict[Any, list[bytes]](list)
        """Sorted prefixes, so that the longest shared prefix is with a neighbour."""

    def compute(self, words: bytes, key: Any, num_cached: Callable[[], int]) -> bool:
        """Return whether a leader computes at least LEAST tokens of these `words_of`, the last
        token excluded, beyond the `num_cached` ones; if none does, this request becomes a leader.
        """
        others = self._of[key]
        place = bisect(others, words)
        shared = max(
            (_shared(words, other) for other in others[max(place - 1, 0) : place + 1]), default=0
        )
        whole = min(shared, len(words) // WORD - 1) // self._page_size * self._page_size
        if whole >= LEAST and whole - num_cached() >= LEAST:
            return True
        others.insert(place, words)
        return False

    def add(self, words: bytes, key: Any) -> None:
        insort(self._of[key], words)


def words_of(tokens: Sequence[int]) -> bytes:
    """Return bytes that sort as the tokens do."""
    return np.asarray(tokens, dtype=">u4").tobytes()


def _shared(a: bytes, b: bytes) -> int:
    """Return the length of the common prefix in tokens."""
    count = min(len(a), len(b)) // WORD
    differ = np.frombuffer(a, ">u4", count) != np.frombuffer(b, ">u4", count)
    return int(differ.argmax()) if differ.any() else count


def _tokens(request: Any) -> Any:
    return request.origin_input_ids + request.output_ids


def kept_words(request: Any) -> bytes:
    """Return a request's `words_of`, cached in the request, since it may wait for many passes."""
    count = len(request.origin_input_ids) + len(request.output_ids)
    kept: bytes = getattr(request, "prefix_words", b"")
    if len(kept) != count * WORD:
        kept = request.prefix_words = words_of(_tokens(request))
    return kept


def _key(request: Any) -> tuple[Any, Any]:
    """Return the cache key: other adapters or salts have separate caches."""
    return request.extra_key, request.cache_salt


def _num_cached(cache: Any, request: Any) -> int:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    extra, salt = _key(request)
    key = RadixKey(token_ids=_tokens(request), extra_key=extra, cache_salt=salt)
    found = cache.match_prefix(MatchPrefixParams(key=key))
    length = getattr(found, "device_prefix_len", None)  # SGLang 0.5.21 gives the places instead
    return len(found.device_indices) if length is None else int(length)
