"""Status report to the trainer: contract, self-check digest, patches, weights, cache, versions, and
an id of the process, since a restarted one holds other weights, and is in no group.

Adds the key `onpolicy` to the scheduler's internal state, which GET /server_info returns. It is
collected in the schedulers, the processes that compute log-probabilities, one per tensor-parallel
rank; a server whose scheduler did not load the plug-in has no such key, and the trainer refuses it.
"""

from __future__ import annotations

import uuid
from typing import Any

from sglang_patches import registry, versions
from sglang_patches.tensor_parallel import report_of_all_ranks

TARGET = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"

INSTANCE = uuid.uuid4().hex


def install() -> None:
    registry.hook(TARGET, _add_report, "after")


def _add_report(result: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    state = result.internal_state
    state["onpolicy"] = {
        **report_of_all_ranks(registry.told()),
        "patches": registry.active(),
        "sglang": versions.sglang_version(),
        "tp_size": state["tp_size"],
        "instance": INSTANCE,
        "cache_tokens": scheduler.max_total_num_tokens,
    }
    return result
