"""Status report to the trainer: contract, self-check digest, patches, weights, cache and version.

Adds the key `onpolicy` to the scheduler's internal state, which GET /server_info returns. It is
collected in the schedulers, the processes that compute log-probabilities, one per tensor-parallel
rank; a server whose scheduler did not load the plug-in has no such key, and the trainer refuses it.
An id of the process is in it, since a restarted one holds other weights, and is in no group. Other
versions of SGLang than the supported ones are refused at the start.
"""

from __future__ import annotations

import re
import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from onpolicy.errors import HOW_TO_INSTALL, ContractError
from sglang_patches import registry
from sglang_patches.engine_ranks import report_of_all_ranks

TARGET = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"

INSTANCE = uuid.uuid4().hex


def install() -> None:
    registry.hook(TARGET, _add_report, "after")


def _add_report(result: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    state = result.internal_state
    state["onpolicy"] = {
        **report_of_all_ranks(registry.told()),
        "patches": registry.active(),
        "sglang": sglang_version(),
        "tp_size": state["tp_size"],
        "instance": INSTANCE,
        "cache_tokens": scheduler.max_total_num_tokens,
    }
    return result


SUPPORTED = ("0.5.21", "0.5.22", "0.5.23")


def sglang_version() -> str:
    """Return the installed SGLang version. Raises ContractError if it is missing or not supported."""
    try:
        installed = version("sglang")
    except PackageNotFoundError as error:
        raise ContractError(
            f"sglang is not installed: the rollout needs it. {HOW_TO_INSTALL}"
        ) from error
    release = re.match(r"\d+\.\d+\.\d+", installed)
    if release is None or release.group() not in SUPPORTED:
        raise ContractError(
            f"sglang=={installed}: the plug-in supports {', '.join(SUPPORTED)}, whose "
            f"source it was checked against. Install one of them: pip install sglang=={SUPPORTED[-1]}"
        )
    return installed
