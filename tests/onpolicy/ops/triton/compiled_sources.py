"""What `make test-kernels` compiled last, so that `make test` can say whether it would compile the same.

python tests/onpolicy/ops/triton/compiled_sources.py    # after it has passed: records the digest
"""

import hashlib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[4]
RECORD = Path(__file__).with_name("compiled_sources.txt")


def digest():
    """SHA-256 of the kernels' sources, of what launches them in the tests, and of Triton's version."""
    files = [
        *(ROOT / "onpolicy/ops/triton").rglob("*.py"),
        ROOT / "onpolicy/weights/xxh3_kernels.py",
    ]
    files += [Path(__file__).with_name(name) for name in ("compile_kernels.py", "test_compile.py")]
    content = hashlib.sha256(version("triton").encode())
    for file in sorted(files):
        content.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return content.hexdigest()


if __name__ == "__main__":
    RECORD.write_text(f"{digest()}\n")
