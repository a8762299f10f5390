"""What a machine has that decides which operators it can keep, in facts that can be written down."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = {"triton": "triton", "sgl_kernel": "sglang-kernel", "deep_gemm": "sgl-deep-gemm"}
"""Modules that the GPU operators import, and the packages they come in."""

OLDEST = {"triton": (3, 6)}
"""Triton's comes with torch 2.11, the oldest that a supported SGLang runs on."""

INSTALL = "Install what is missing with: pip install -e '.[gpu]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What decides which operators can run here."""

    capability: tuple[int, int] | None
    """Compute capability of the GPU, None without one. Example: (9, 0)"""

    packages: Mapping[str, str]
    """Modules of DISTRIBUTIONS that are there, and their versions. Example: {"triton": "3.6.0"}"""

    @staticmethod
    def here() -> Machine:
        """The machine that this process runs on."""
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        found = {name for name in DISTRIBUTIONS if importlib.util.find_spec(name) is not None}
        return Machine(capability=capability, packages={name: _version(name) for name in found})

    @property
    def capability_name(self) -> str:
        """Example: 9.0"""
        return "none" if self.capability is None else ".".join(map(str, self.capability))

    def lacks(self, backend: str, modules: Sequence[str]) -> str | None:
        """Which of `modules` is missing or too old for `backend`, and how to get it; None if none."""
        for module in modules:
            if module not in self.packages:
                return (
                    f"{module} is missing, which {backend} operators call (package "
                    f"{DISTRIBUTIONS[module]}, in the version that SGLang asks for). {INSTALL}"
                )
        for module in OLDEST.keys() & set(modules):
            oldest, numbers = OLDEST[module], re.match(r"(\d+)\.(\d+)", self.packages[module])
            if numbers and tuple(map(int, numbers.groups())) < oldest:
                wanted = ".".join(map(str, oldest))
                return f"{module}=={self.packages[module]}: must be at least {wanted}. {INSTALL}"
        return None


def _version(module: str) -> str:
    try:
        return version(DISTRIBUTIONS[module])
    except PackageNotFoundError:
        return "unknown"
