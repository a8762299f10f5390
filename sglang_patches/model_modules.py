"""Omission of SGLang's own two hundred model definitions where an engine runs the trainer's.

SGLang imports all of them to look one name up, which takes seconds in each process that holds a
model. An aligned engine uses the transformers backend, which is one of them.

Source: import_model_classes, sglang/srt/models/registry.py. Can go when SGLang looks up by name.
"""

from __future__ import annotations

import os
import pkgutil
from importlib.util import find_spec

REGISTRY = "sglang.srt.models.registry"
TRANSFORMERS = "transformers"
LEFT_OUT = "SGLANG_DISABLED_MODEL_ARCHS"
"""SGLang's own variable: the last parts of module names to skip."""


def install() -> None:
    """Set the variable for this process and its children."""
    spec = find_spec(REGISTRY.rpartition(".")[0])
    assert spec is not None and spec.submodule_search_locations is not None
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    os.environ[LEFT_OUT] = ",".join(name for name in names if name != TRANSFORMERS)
