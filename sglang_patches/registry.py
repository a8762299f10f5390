"""Record of the requested patches, and of whether SGLang applied them.

SGLang only logs when a plug-in or a hook fails, and serves on without it. So every patch is
recorded here, and `require_active` is called at the points where an engine could start to serve: in
the main process before the server starts, and in every model process when its model is loaded and
again when its KV pool is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError

_requested: list[str] = []
_installed: list[str] = []
report: dict[str, Any] = {}
"""This process's report to the trainer (status.py); functions in it are called for values."""


def told() -> dict[str, Any]:
    """Return the report as it is now."""
    return {key: value() if callable(value) else value for key, value in report.items()}


def hook(target: str, function: Callable[..., Any], kind: str) -> None:
    """Ask SGLang to hook `target` (dotted path); kind: before, after, around or replace."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType(kind))
    _requested.append(target)


def note(name: str) -> None:
    """Record a patch that was installed directly, through a registration function of SGLang's."""
    _installed.append(name)


def started(contract: NumericsContract) -> None:
    """Record that the plug-in ran to its end in this process, under `contract`."""
    report["contract"] = contract.to_json()


def contract() -> NumericsContract:
    """Return the contract under which the plug-in ran in this process."""
    return NumericsContract.from_json(report["contract"])


def active() -> list[str]:
    """Return the patches in force in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(_installed + [target for target in _requested if target in HookRegistry._patched])


def require_active() -> None:
    """Raise ContractError if the plug-in did not run here or one of its patches did not apply."""
    if "contract" not in report:
        raise ContractError(
            "the onpolicy plug-in did not run in this SGLang process, so its operators are not in. "
            "Look for 'Failed to load plugin' or 'Failed to execute general plugin' in the engine's "
            "log above; if SGLANG_PLUGINS is set, it must name 'onpolicy'."
        )
    missing = sorted({*_requested, *_installed} - set(active()))
    if missing:
        raise ContractError(
            f"missing patches={missing}: SGLang could not apply them ({_reason(missing)}), so its "
            "results would not be the trainer's. Install a supported SGLang, with what it needs."
        )


def _reason(missing: list[str]) -> str:
    """Return the error that keeps SGLang from applying the first of the missing patches."""
    for target in missing:
        parts = target.split(".")
        try:
            found = importlib.import_module(parts[0])
            for end, name in enumerate(parts[1:], 2):
                if not hasattr(found, name):
                    importlib.import_module(".".join(parts[:end]))
                found = getattr(found, name)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "see 'Failed to apply hooks' in the log above"
