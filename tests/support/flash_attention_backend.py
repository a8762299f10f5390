"""SGLang's attention backend for GPUs as text: importing it wants kernels that CPUs have no build of."""

import ast
import importlib.util
from pathlib import Path

SOURCE = "srt/layers/attention/flashattention_backend.py"


def tree():
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    return ast.parse((Path(root) / SOURCE).read_text())


def attributes_of_backend():
    """The names of what `FlashAttentionBackend.__init__` reads and sets of objects."""
    classes = [node for node in ast.walk(tree()) if isinstance(node, ast.ClassDef)]
    backend = next(node for node in classes if node.name == "FlashAttentionBackend")
    constructor = next(node for node in backend.body if getattr(node, "name", "") == "__init__")
    return {node.attr for node in ast.walk(constructor) if isinstance(node, ast.Attribute)}
