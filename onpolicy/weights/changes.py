"""Changes of the weights from one push to the next: what is sent of a tensor, and what follows from it.

Most bfloat16 weights keep their bits in an optimizer step, whose update rounding drops
(arXiv:2602.03839). Of a tensor of which at most a fifth changed, the trainer sends places and new
values. The engine puts them into a copy of what it holds, then loads and proves the whole tensor as if
it had been pushed, so a wrong base, place or value is as any other wrong weight. Values replace values
and are not added, so changes may be put in twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from onpolicy.errors import WeightSyncError
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import size_of

PLACES, VALUES = ".changed_places", ".changed_values"
"""What the names of a tensor's two parts end with: int32 places in the flat tensor, and its values."""

MOST_CHANGED = 0.2
"""The largest share of a tensor's elements that is sent as changes; of bfloat16, 0.6 of its bytes."""

LARGEST = 2**31 - 1
"""The most elements of such a tensor: places are int32, and `nonzero` on GPUs takes no more."""

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LastPush:
    """A copy of the trained weights of a push, in host memory, and the changes since."""

    def __init__(self) -> None:
        self.digest = ""
        """Digest of the push that engines proved; empty during a push, and after one that failed."""
        self._held: dict[str, Tensor] = {}
        self._frozen: set[str] = set()
        self._compared = self._changed = self._bytes = self._sent = 0

    def begin(self, *, is_known: bool) -> None:
        """Begin a push to engines that hold the last one, or else a whole push."""
        self.digest = ""
        if not is_known:
            self._held.clear()
        self._compared = self._changed = self._bytes = self._sent = 0

    def leaving_out(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """Yield buckets of frozen weights, of which nothing is kept: they do not change."""
        for bucket in buckets:
            self._frozen |= {name for name, _ in bucket}
            yield bucket

    def changes(self, bucket: WeightBucket) -> WeightBucket:
        """Return what is to be sent of a bucket."""
        sent = [
            part
            for name, tensor in bucket
            for part in ([(name, tensor)] if name in self._frozen else self._of(name, tensor))
        ]
        self._bytes += size_of(bucket)
        self._sent += size_of(sent)
        return sent

    def _of(self, name: str, tensor: Tensor) -> WeightBucket:
        tensor = tensor.detach().contiguous()
        held = self._held.get(name)
        if held is None:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._held[name] = held.copy_(tensor)
            return [(name, tensor)]
        if not 0 < tensor.numel() <= LARGEST:
            held.copy_(tensor)
            return [(name, tensor)]
        places = (_words(tensor) != _words(held).to(tensor.device)).nonzero()[:, 0]
        self._compared += tensor.numel()
        self._changed += len(places)
        if len(places) > MOST_CHANGED * tensor.numel():
            held.copy_(tensor)
            return [(name, tensor)]
        if not len(places):  # every tensor arrives, so that every push proves it anew
            places = places.new_zeros(1)
        values = tensor.view(-1)[places]
        held.view(-1)[places.cpu()] = values.cpu()
        return [(name + PLACES, places.int()), (name + VALUES, values)]

    def metrics(self) -> dict[str, float]:
        """Return metrics of this push; empty if it was whole."""
        if not self._compared:
            return {}
        return {
            "push/changed_share": self._changed / self._compared,
            "push/sent_share": self._sent / self._bytes,
        }


def restored(
    weights: Iterable[tuple[str, Tensor]], base: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors: those that came so, and those of which changes came, put into `base(name)`,
    which is a new copy. Raises WeightSyncError for changes that cannot be of that tensor."""
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        whole = name.removesuffix(PLACES).removesuffix(VALUES)
        if whole == name:
            yield name, tensor
        elif whole not in waiting:
            waiting[whole] = tensor
        else:
            parts = waiting.pop(whole), tensor
            places, values = parts if name.endswith(VALUES) else parts[::-1]
            yield whole, _put_in(whole, base(whole), places, values)
    if waiting:
        raise WeightSyncError(f"parameters={sorted(waiting)}: {_INCOMPLETE}")


_INCOMPLETE = (
    "the changes that were pushed are not complete, or not of what the engine holds. The next push "
    "brings all weights."
)


def _put_in(name: str, base: Tensor, places: Tensor, values: Tensor) -> Tensor:
    fits = places.shape == values.shape and values.dtype == base.dtype and len(places)
    # A GPU would answer a place beyond the end with the end of the process.
    if not fits or places.min() < 0 or places.max() >= base.numel():
        raise WeightSyncError(f"parameters={[name]}: {_INCOMPLETE}")
    base.view(-1)[places.to(base.device, torch.int64)] = values.to(base.device)
    return base


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as integers: zeros of either sign differ, and a NaN is itself."""
    return tensor.view(-1).view(WORDS[tensor.itemsize])
