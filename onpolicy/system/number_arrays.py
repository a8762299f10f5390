"""Numbers of a sequence's tokens, in one array: they are held, compared and sent as bytes."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

N = TypeVar("N", bound=float)


class Numbers(Sequence[N]):
    """A sequence of numbers of one type that never changes; a slice is a view of it.

    `+` writes the further ones into the spare end of its array, so that a sequence that grows by
    turns costs what each of them adds. Whoever asks first gets the spare end, and any other a copy.
    """

    dtype: ClassVar[str]

    def __init__(self, values: Any = ()):
        self.array: NDArray[Any] = np.asarray(values, self.dtype)
        self._spare: list[NDArray[Any]] = []
        """The array with its spare end, if there is one and nobody has it yet."""

    def __add__(self, more: Any) -> Self:
        added = np.asarray(more, self.dtype)
        start, end = len(self), len(self) + len(added)
        if start == end:
            return self
        try:
            whole = self._spare.pop()  # of two threads, one gets it
        except IndexError:
            whole = self.array
        if len(whole) < end:
            whole = np.empty(max(end, start + start // 8), self.dtype)
            whole[:start] = self.array
        whole[start:end] = added
        grown = type(self)(whole[:end])
        if len(whole) > end:
            grown._spare.append(whole)
        return grown

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> N: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: int | slice) -> N | Self:
        found = self.array[place]
        if not isinstance(place, slice):
            number: N = found.item()
            return number
        return self if len(found) == len(self) and place.step is None else type(self)(found)

    def __iter__(self) -> Any:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return np.array_equal(self.array, other.array)
        return self.tolist() == other if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype, copy=copy)

    def __reduce__(self) -> Any:
        """Return its bytes; those of one number if all have the same."""
        data, count = self.array.tobytes(), len(self)
        one = data[: self.array.itemsize]
        return _read, (type(self), one if data == one * count else data, count)

    def tolist(self) -> list[N]:
        found: list[N] = self.array.tolist()
        return found


def _read(kind: type[Numbers[Any]], data: bytes, count: int) -> Numbers[Any]:
    found = np.frombuffer(data, kind.dtype)
    return kind(found if len(found) == count else found.repeat(count))


class Ints(Numbers[int]):
    """Numbers of 32 bits."""

    dtype = "<i4"


class Flags(Numbers[bool]):
    """Truth values."""

    dtype = "?"


class Floats(Numbers[float]):
    """Numbers in float32."""

    dtype = "<f4"


class Doubles(Numbers[float]):
    """Numbers in float64."""

    dtype = "<f8"
