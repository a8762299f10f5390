"""What one process holds in memory, by what it is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from onpolicy.system.memory import gib


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of one process, by what they are for; or of several like it."""

    name: str

    parts: dict[str, int]
    """Where it computes: on its GPU, or in the memory of its host."""

    count: int = 1

    host: dict[str, int] = field(default_factory=dict)
    """In the memory of the host of a process that computes on a GPU."""

    @staticmethod
    def on_host(name: str, parts: dict[str, int], device: str, count: int = 1) -> ProcessMemory:
        """One that computes nothing on the device."""
        on_gpus = device == "cuda"
        return ProcessMemory(name, {} if on_gpus else parts, count, parts if on_gpus else {})

    @property
    def each(self) -> int:
        """One process's, where it computes."""
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
