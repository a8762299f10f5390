"""The seam between SGLang versions: what this plug-in supports, and where those versions differ.

Supported: 0.5.17, the last for torch 2.11, and 0.5.21 to 0.5.23 (torch 2.14). What differs between
them is asked here by feature, never by comparing version numbers elsewhere.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from onpolicy.errors import ContractError

SUPPORTED = ("0.5.17", "0.5.21", "0.5.22", "0.5.23")


def sglang_version() -> str:
    """The installed SGLang version. Raises ContractError if there is none or it is not supported."""
    try:
        installed = version("sglang")
    except PackageNotFoundError as error:
        raise ContractError(
            "sglang is not installed: the rollout needs it. Run `make setup` on a machine without a "
            "GPU, or `pip install -e '.[gpu]'` on one with a GPU."
        ) from error
    release = re.match(r"\d+\.\d+\.\d+", installed)
    if release is None or release.group() not in SUPPORTED:
        raise ContractError(
            f"sglang=={installed}: the plug-in supports {', '.join(SUPPORTED)}, whose "
            f"source it was checked against. Install one of them: pip install sglang=={SUPPORTED[-1]}"
        )
    return installed


def has_weight_update_sessions() -> bool:
    """Whether weight updates must stand between begin_weight_update and end_weight_update."""
    return _is_newer_than_0_5_17()


def has_model_hook() -> bool:
    """Whether what SGLang asks of single architectures stands in a module of its own."""
    return _is_newer_than_0_5_17()


def wants_model_names() -> bool:
    """Whether /v1/responses takes the name of the served model alone."""
    return _is_newer_than_0_5_17()


def _is_newer_than_0_5_17() -> bool:
    return not sglang_version().startswith("0.5.17")


def longest_prefill(server_args: Any) -> int:
    """Most tokens of one prefill of this engine, as SGLang resolved its flags."""
    try:
        from sglang.srt.runtime_context import get_schedule

        server_args = get_schedule()
    except ImportError:  # versions that resolve them in place
        pass
    chunk: int | None = server_args.chunked_prefill_size
    return chunk if chunk and chunk > 0 else int(server_args.max_prefill_tokens)
