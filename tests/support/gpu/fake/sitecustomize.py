"""Shows every process that is started with this directory on its PYTHONPATH the H100s of FAKE_GPUS.

What asks about GPUs sees them; what computes on one still fails, since there is none. The libraries
whose kernels need one can be imported, and whatever is called of them raises.
"""

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

LIBRARIES = ("sgl_kernel", "deep_gemm")

SETTINGS = ("use_deterministic_algorithms",)
"""Functions of theirs that launch nothing."""

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=85_000_000_000,
    multi_processor_count=132,
    L2_cache_size=50 << 20,
)


class _AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel


class Kernel(metaclass=_AnyName):
    """Stands for whatever is imported from LIBRARIES."""

    def __init__(self, *args, **options):
        raise RuntimeError("a kernel was launched, and the GPU is a fake")


class _Library(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *_: None) if name in SETTINGS else Kernel


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        is_ours = name.partition(".")[0] in LIBRARIES
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec):
        return _Library(spec.name)

    def exec_module(self, module):
        pass


def _show_gpus(count):
    """Answer what is asked of `torch.cuda`, and make tensors for a GPU on the CPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if torch.device(kwargs.get("device") or "cpu").type == "cuda":
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    OnCpu().__enter__()
    torch.version.cuda = "13.0"
    answers = {
        "is_available": True,
        "device_count": count,
        "current_device": 0,
        "get_device_name": H100.name,
        "get_device_capability": (H100.major, H100.minor),
        "get_device_properties": H100,
        "mem_get_info": (H100.total_memory - 1_000_000_000, H100.total_memory),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda device=None, answer=answer: answer)


sys.meta_path.insert(0, _Finder())
_show_gpus(int(os.environ["FAKE_GPUS"]))
