"""Changes of weights: what is sent of a tensor, and that what follows has the bits of the whole."""

import pytest
import torch

from onpolicy.errors import WeightSyncError
from onpolicy.weights.changes import MOST_CHANGED, PLACES, VALUES, LastPush, restored

NAME = "layers.0.weight"


def pushed(last, tensor, *, is_known=True):
    """What is sent of a push of one tensor, by name."""
    last.begin(is_known=is_known)
    return dict(last.changes([(NAME, tensor)]))


def after(base, sent):
    ((name, tensor),) = restored(sent.items(), lambda name: base.clone())
    assert name == NAME
    return tensor


@pytest.fixture
def base():
    return torch.randn(30, 10, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool]
)
@pytest.mark.parametrize("strided", [False, True])
def test_an_engine_gets_the_bits_of_the_whole_from_what_changed(base, dtype, strided):
    base = base.clamp(-1, 1).to(dtype)
    new = base.clone()
    new.view(-1)[[0, 7, 299]] = base.view(-1)[[1, 8, 2]].flatten()
    if strided:
        base, new = base.t(), new.t()
    last = LastPush()
    assert [*pushed(last, base, is_known=False)] == [NAME]
    sent = pushed(last, new)
    assert sent.keys() == {NAME + PLACES, NAME + VALUES}
    for order in (sent, dict(reversed(sent.items()))):
        found = after(base.contiguous(), order)
        assert torch.equal(found.view(torch.uint8), new.contiguous().view(torch.uint8))
    assert len(pushed(last, new)[NAME + PLACES]) == 1  # against this push, not the first


@pytest.mark.parametrize(("number", "other"), [(0.0, -0.0), (float("nan"), 2.0)])
def test_bits_are_compared_and_not_numbers(base, number, other):
    """A zero that changes its sign is sent, and a NaN that stays is not."""
    base.view(-1)[:3] = number
    last, new = LastPush(), base.clone()
    new.view(-1)[1] = other
    pushed(last, base, is_known=False)
    assert pushed(last, new)[NAME + PLACES].tolist() == [1]
    assert pushed(last, new)[NAME + PLACES].tolist() == [0]  # nothing: one place stands for that


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_tensor_of_which_more_than_a_fifth_changed_goes_whole(base, beyond):
    last, new = LastPush(), base.clone()
    count = int(MOST_CHANGED * base.numel()) + beyond
    new.view(-1)[:count] += 1
    pushed(last, base, is_known=False)
    assert (NAME in pushed(last, new)) == bool(beyond)
    assert last.metrics()["push/changed_share"] == count / base.numel()
    assert NAME not in pushed(last, new)  # whichever way it went, it is what is compared next


def test_an_empty_tensor_and_one_with_too_many_places_go_whole(base, monkeypatch):
    for tensor, largest in ((base[:0], 10), (base, base.numel() - 1)):
        monkeypatch.setattr("onpolicy.weights.changes.LARGEST", largest)
        last = LastPush()
        pushed(last, tensor, is_known=False)
        assert NAME in pushed(last, tensor)


def test_nothing_is_kept_of_what_is_frozen(base):
    last = LastPush()
    last.begin(is_known=False)
    for bucket in last.leaving_out([[("frozen", base)]]):
        assert last.changes(bucket) == bucket
    assert not last._held


def test_a_whole_push_forgets_what_was_pushed_before(base):
    last = LastPush()
    pushed(last, base, is_known=False)
    assert [*pushed(last, base, is_known=False)] == [NAME] and not last.metrics()


def broken(change):
    """Changes of which one thing is wrong."""
    places, values = torch.tensor([3, 5], dtype=torch.int32), torch.ones(2, dtype=torch.bfloat16)
    sent = {NAME + PLACES: places, NAME + VALUES: values}
    change(sent)
    return sent


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: sent.pop(NAME + PLACES),
        lambda sent: sent.pop(NAME + VALUES),
        lambda sent: sent.update({NAME + VALUES: sent[NAME + VALUES][:1]}),
        lambda sent: sent.update({NAME + VALUES: sent[NAME + VALUES].float()}),
        lambda sent: sent[NAME + PLACES].fill_(300),
        lambda sent: sent[NAME + PLACES].fill_(-1),
        lambda sent: sent.update({name: part[:0] for name, part in sent.items()}),
    ],
)
def test_changes_that_cannot_be_of_the_tensor_are_refused_before_a_device_reads_them(base, change):
    """As a place beyond the end, which ends a process with a GPU (vllm-project/vllm-ascend#13682)."""
    with pytest.raises(WeightSyncError, match=rf"parameters=\['{NAME}'\]: the changes"):
        after(base, broken(change))
    assert after(base, broken(lambda sent: None)).view(-1)[[3, 5]].tolist() == [1.0, 1.0]
