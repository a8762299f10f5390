"""What `make test-kernels` compiled last, so that `make test` can say whether it would compile the same.

python tests/onpolicy/ops/triton/compiled_sources.py    # after it has passed: records the digest
"""

import ast
import hashlib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[4]
RECORD = Path(__file__).with_name("compiled_sources.txt")

LAUNCHED_THROUGH = (
    "differentiable_attention",
    "layouts",
    "log_probs",
    "logit_chunks",
    "row_parallel",
)
"""What says with which sizes and options kernels are launched."""


def digest():
    """Return the SHA-256 of the kernels' code, of what launches them, and of Triton's version."""
    files = [
        *(ROOT / "onpolicy/ops/triton").rglob("*.py"),
        *(ROOT / f"onpolicy/ops/{name}.py" for name in LAUNCHED_THROUGH),
        ROOT / "onpolicy/weights/xxh3_kernels.py",
    ]
    files += [Path(__file__).with_name(name) for name in ("compile_kernels.py", "test_compile.py")]
    content = hashlib.sha256(version("triton").encode())
    for file in sorted(files):
        content.update(f"{file.relative_to(ROOT)}\n{code_of(file)}".encode())
    return content.hexdigest()


def code_of(file):
    """Return a file's code without its docstrings and comments, which no compiler sees."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not is_text(each)]
    return ast.unparse(tree)


def is_text(node):
    """Whether a statement is a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


if __name__ == "__main__":
    RECORD.write_text(f"{digest()}\n")
