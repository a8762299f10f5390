"""Extensions that a command loads into an engine beside the patches of its contract."""

from __future__ import annotations

import json
import os
import pkgutil

from onpolicy.contract import EXTENSIONS_VARIABLE, NumericsContract
from onpolicy.ops import Operators


class Extension:
    """An object in every process of an engine, made from a text of the command's (`EngineSpec`)."""

    def around(self, operators: Operators) -> Operators:
        """Return the operators for the engine: these, or replacements."""
        return operators

    def install(self, contract: NumericsContract) -> None:
        """Hook SGLang, after all patches of the contract."""


def asked_for() -> list[Extension]:
    """Return the extensions that ONPOLICY_EXTENSIONS names, in its order."""
    named: dict[str, str] = json.loads(os.environ.get(EXTENSIONS_VARIABLE, "{}"))
    return [pkgutil.resolve_name(name)(text) for name, text in named.items()]
