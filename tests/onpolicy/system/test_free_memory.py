"""Free memory, by what Linux and control groups say of it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from onpolicy.system import free_memory as memory
from onpolicy.system.free_memory import free_memory

GIB = 1 << 30


def write(root, files):
    for name, text in {
        "proc/meminfo": f"MemFree: 1 kB\nMemAvailable: {8 << 20} kB\n",
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_2(limit, group="sys/fs/cgroup/a/b"):
    return {
        "proc/self/cgroup": "0::/a/b\n",
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{2 * GIB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }


VERSION_1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/a\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(6 * GIB),
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(4 * GIB),
    "sys/fs/cgroup/memory/a/memory.stat": f"total_inactive_file {GIB}\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        (version_2("max"), 8),
        (version_2(5 * GIB), 4),
        (version_2(5 * GIB, "sys/fs/cgroup/a"), 4),
        (version_2(5 * GIB, "sys/fs/cgroup/other"), 8),
        (version_2(50 * GIB), 8),
        (VERSION_1, 3),
    ],
    ids=["no-group", "no-limit", "limit", "limit-around", "limit-of-others", "more-than-there-is", "v1"],
)  # fmt: skip
def test_free_is_what_linux_has_and_the_group_may_take(files, expected, tmp_path):
    assert free_memory(write(tmp_path, files)) == expected * GIB


def test_this_host_has_some():
    assert 0 < free_memory() < 1 << 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there, and PyTorch counts it")
def test_no_pytorch_is_imported_to_count_no_gpus():
    code = "import sys; from onpolicy.system.free_memory import num_gpus"
    code += "; print(num_gpus(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0 False\n", done.stderr


@pytest.mark.parametrize(
    ("cuda", "hip", "has_driver", "sees_none"),
    [
        (None, None, True, True),
        ("13.0", None, False, True),
        ("13.0", None, True, False),
        (None, "7.0", False, False),
    ],
)
def test_a_build_for_gpus_is_asked_unless_the_driver_of_cuda_is_missing(
    cuda, hip, has_driver, sees_none, tmp_path, monkeypatch
):
    def load(name):
        assert name == "libcuda.so.1"
        if not has_driver:
            raise OSError
        return object()

    (tmp_path / "version.py").write_text(f"cuda = {cuda!r}\nhip = {hip!r}\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(memory, "find_spec", lambda name: spec)
    monkeypatch.setattr(memory, "CDLL", load)
    assert memory._sees_none() == sees_none
