"""The memory of one process, by purpose."""

from __future__ import annotations

from dataclasses import dataclass, field

from onpolicy.system.memory import gib


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The bytes of one process, or of each of several equal ones, by purpose."""

    name: str

    parts: dict[str, int]
    """The bytes where the process computes: on its GPU, or in host memory."""

    count: int = 1

    host: dict[str, int] = field(default_factory=dict)
    """The bytes in host memory of a process that computes on a GPU."""

    @staticmethod
    def on_host(name: str, parts: dict[str, int], device: str, count: int = 1) -> ProcessMemory:
        """Return the memory of a process that does not compute on the device."""
        on_gpus = device == "cuda"
        return ProcessMemory(name, {} if on_gpus else parts, count, parts if on_gpus else {})

    @property
    def each(self) -> int:
        """Return the bytes of one process, where it computes."""
        return sum(self.parts.values())

    @property
    def bytes(self) -> int:
        return self.count * self.each

    @property
    def host_bytes(self) -> int:
        return self.count * sum(self.host.values())

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        beside = f"; on its host {_terms(self.host)}" if self.host else ""
        return f"{times}{self.name}: {_terms(self.parts)} = {gib(self.bytes)} GiB{beside}"


def _terms(parts: dict[str, int]) -> str:
    return " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
