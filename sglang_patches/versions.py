"""Supported SGLang versions. Features in which they differ are detected here."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from onpolicy.errors import ContractError

SUPPORTED = ("0.5.21", "0.5.22", "0.5.23")


def sglang_version() -> str:
    """Return the installed SGLang version. Raises ContractError if it is missing or not supported."""
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
