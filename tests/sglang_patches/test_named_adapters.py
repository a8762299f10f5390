"""Requests, rows and pushes of an engine that holds adapters under several names."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onpolicy.contract import NAMES_VARIABLE, AdapterShape
from onpolicy.errors import WeightSyncError
from onpolicy.models.adapters import add_adapters
from onpolicy.models.align import AlignedLinear
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.row_parallel import WHOLE
from onpolicy.weights.rounding import rounded
from sglang_patches import named_weights, registry, weights
from sglang_patches.named_adapters import (
    HeadRows,
    NamedLowRank,
    Pushes,
    Rows,
    _abort,
    place_of,
    put_in,
)
from tests.support.tiny_contract import CONTRACT
from tests.support.weight_digests import digest_of

SHAPE = AdapterShape(rank=4, scale=0.3, targets=("up_proj",))
OPERATORS = CpuOperators()
ROWS = ["a", "b", "b", None, "a", "b"]


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """One of two names, outside a server."""
    monkeypatch.setenv(NAMES_VARIABLE, "a b")
    monkeypatch.setattr(weights, "rank", lambda: 0)
    monkeypatch.setattr(registry, "report", {})


class Model(nn.Module):
    """A linear, whose loader copies what it is given under the engine's names."""

    def __init__(self, dtype=torch.bfloat16, shape=SHAPE):
        super().__init__()
        torch.manual_seed(1)
        self.up_proj = AlignedLinear(nn.Linear(48, 80, dtype=dtype), OPERATORS, WHOLE)
        add_adapters(self, OPERATORS, shape)
        put_in(self, OPERATORS, shape)

    def load_weights(self, pushed):
        for name, tensor in pushed:
            self.state_dict()[name].copy_(tensor)


def factors(seed, dtype=torch.bfloat16, dora=False):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    pushed = {"up_proj.lora.A": draw(4, 48).to(dtype), "up_proj.lora.B": draw(80, 4).to(dtype)}
    lengths = {f"up_proj.lora.magnitude.{of}": draw(80).exp() for of in ("m", "norm")}
    return pushed | lengths if dora else pushed


def filled(dtype, dora):
    model = Model(dtype, dataclasses.replace(SHAPE, dora=dora))
    for seed, name in enumerate("ab"):
        model.load_weights((place_of(name)(n), x) for n, x in factors(seed, dtype, dora).items())
    return model


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_each_name_have_the_bits_that_they_have_alone(dtype, dora):
    model, rows = filled(dtype, dora), Rows()
    base = AlignedLinear(model.up_proj, OPERATORS, WHOLE)
    adapters: NamedLowRank = model.up_proj.lora
    adapters._rows = rows
    x = torch.randn(1, len(ROWS), 48, dtype=dtype)
    rows.set(ROWS)
    together = model.up_proj(x)
    for name in ("a", "b", None):
        own = [i for i, each in enumerate(ROWS) if each == name]
        rows.set([name] * len(own))
        assert torch.equal(model.up_proj(x[:, own]), together[:, own])
    assert torch.equal(base(x)[0, 3], together[0, 3])
    rows.set(["b" if name == "a" else name for name in ROWS])  # as a control
    others = model.up_proj(x)
    assert not torch.equal(others[0, 0], together[0, 0])
    assert torch.equal(others[0, 1], together[0, 1])


def batch_of(ids, counts=None, drafted=0):
    total = sum(counts) if counts else len(ids) * max(drafted, 1)
    mode = SimpleNamespace(
        is_decode=lambda: not counts and not drafted, is_target_verify=lambda: drafted > 0
    )
    return SimpleNamespace(
        lora_ids=ids,
        batch_size=len(ids),
        forward_mode=mode,
        input_ids=torch.zeros(total),
        extend_seq_lens=counts and torch.tensor(counts),
    )


def listed(places):
    return {name: rows.tolist() for name, rows in places.items()}


def test_rows_are_known_by_the_requests_that_they_are_of():
    rows = Rows()
    rows.watch(None, batch_of(["/a:1", None, "/b:12"], [2, 1, 3]))
    assert listed(rows.places(6)) == {"a": [0, 1], None: [2], "b": [3, 4, 5]}
    rows.watch(None, batch_of(["/b:1", "/a:1"]))
    assert listed(rows.places(2)) == {"b": [0], "a": [1]}
    rows.watch(None, batch_of(["/b:1", "/a:1"], drafted=3))
    assert listed(rows.places(6)) == {"b": [0, 1, 2], "a": [3, 4, 5]}
    with pytest.raises(RuntimeError, match="3 rows, of which 6 are known"):
        rows.places(3)


def test_rows_of_logits_are_known_though_they_are_a_part_of_all_and_come_in_chunks():
    rows = Rows()
    head = HeadRows(rows)
    rows.watch(None, batch_of(["/a:1", "/b:1"], [2, 3]))
    head.watch((torch.zeros(2, 4), None, []))  # the last ones
    assert listed(head.places(2)) == {"a": [0], "b": [1]}
    head.watch((torch.zeros(4, 4), None, [0, 1, 1, 1]))  # prompts, too
    assert listed(head.places(3)) == {"a": [0], "b": [1, 2]} and listed(head.places(1)) == {
        "b": [0]
    }
    with pytest.raises(RuntimeError, match="1 rows, of which 0 are known"):
        head.places(1)
    rows.watch(None, batch_of(["/a:1", "/b:1"], drafted=2))
    head.watch((torch.zeros(4, 4), None, []))
    assert listed(head.places(4)) == {"a": [0, 1], "b": [2, 3]}


def test_places_lie_on_the_device_of_what_is_computed():
    rows = Rows()
    head, batch = HeadRows(rows), batch_of(["/a:1", "/b:1"])
    batch.input_ids = batch.input_ids.to("meta")
    rows.watch(None, batch)
    head.watch((torch.zeros(2, 4, device="meta"), None, []))
    for places in (rows.places(2), head.places(2)):
        assert {place.device.type for place in places.values()} == {"meta"}


def resolved(pushes, lora_path, **more):
    request = SimpleNamespace(lora_path=lora_path, rid="x", lora_id=None, **more)
    asyncio.run(pushes.resolve(None, request))
    return request.lora_id


def test_prefixes_of_other_names_and_of_earlier_pushes_are_apart():
    pushes = Pushes(("a", "b"))
    pushes.note(None, None, "a:0")
    first = resolved(pushes, "a")
    pushes.note(None, None, "b:0")
    assert resolved(pushes, "a") == first and resolved(pushes, ["a", "b"]) == [first, "/b:1"]
    pushes.note(None, None, "a:0")  # the same version again, maybe of other bits
    assert resolved(pushes, "a") != first


@pytest.mark.parametrize("given", [None, "", "b", "c", ["a", None], ["a", "c"]])
def test_a_request_for_what_is_not_there_is_refused_and_a_health_check_is_not(given):
    pushes = Pushes(("a", "b"))
    pushes.note(None, None, "a:0")
    pushes.note(None, None, "default")
    with pytest.raises(ValueError, match="never answered by the base instead"):
        resolved(pushes, given)
    request = SimpleNamespace(lora_path=None, rid="HEALTH_CHECK_1")
    asyncio.run(pushes.resolve(None, request))


def told(pushes, name, spans):
    async def answers(*_):
        yield {"meta_info": {"weight_version": spans[-1]["version"], "weight_versions": spans}}

    async def collect():
        request = SimpleNamespace(lora_path=name)
        return [answer["meta_info"] async for answer in pushes.tell(answers, None, request)]

    return asyncio.run(collect())[0]


def test_an_answer_says_the_version_of_its_own_name():
    pushes = Pushes(("a", "b"))
    pushes.note(None, None, "a:3")
    pushes.note(None, None, "b:9")
    meta = told(pushes, "a", [{"version": "b:9", "start": 0, "end": 5}])
    assert meta["weight_version"] == "3" and meta["weight_versions"][0]["version"] == "3"
    both = [{"version": "a:2", "start": 0, "end": 2}, {"version": "a:3", "start": 2, "end": 5}]
    assert told(pushes, "a", both)["weight_version"] == "a:3"  # which no run takes


@pytest.mark.parametrize(
    ("rid", "aborted"),
    [("/a", ["1", "3"]), ("/b", ["2"]), ("2", ["2"]), ("/c", []), ("", ["all"])],
)
def test_an_abort_of_a_name_gives_up_its_requests_though_an_earlier_one_came_too_soon(rid, aborted):
    asked = {"1": "a", "2": "b", "3": "a", "4": None}
    states = {
        i: SimpleNamespace(obj=SimpleNamespace(lora_path=name), abort_sent=True)
        for i, name in asked.items()
    }
    manager, given_up = SimpleNamespace(rid_to_state=states), []

    def abort(manager, rid="", abort_all=False):
        given_up.append("all" if abort_all else rid)

    _abort(abort, manager, rid, abort_all=not rid)
    assert given_up == aborted
    assert [i for i in asked if not states[i].abort_sent] == [i for i in aborted if rid[:1] == "/"]


@pytest.fixture
def held():
    """(model, what pushes weights to it under a name)."""
    model = Model()
    named_weights.watch_loads(model)

    def push(name, weights):
        updater = SimpleNamespace(_session=object())
        request = SimpleNamespace(weight_version=f"{name}:0")
        return named_weights._update(
            lambda *_: model.load_weights(weights.items()), updater, request
        )

    return model, push


def test_a_push_replaces_the_adapters_of_its_name_alone_and_is_told_with_its_base(held):
    model, push = held
    pushed = {name: {"up_proj.weight": model.up_proj.weight.clone(), **factors(seed)}
              for seed, name in enumerate("ab")}  # fmt: skip
    assert registry.told()["pushed"] == {}
    push("a", pushed["a"])
    base = digest_of({"up_proj.weight": model.up_proj.weight})
    assert registry.told()["pushed"] == {"a": {"version": "0", "base": base}}
    push("b", pushed["b"])
    assert registry.told()["weights"] == {name: digest_of(pushed[name]) for name in "ab"}
    newer = {**pushed["b"], **factors(5)}
    push("b", factors(5))
    assert registry.told()["weights"] == {"a": digest_of(pushed["a"]), "b": digest_of(newer)}
    assert torch.equal(model.up_proj.lora.of_a.A, pushed["a"]["up_proj.lora.A"])


def test_another_base_and_a_push_without_a_known_name_change_nothing(held):
    model, push = held
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = {"up_proj.weight": model.up_proj.weight + 1, **factors(1)}
    for answer, rule in (
        (push("a", other), "parameters=up_proj.weight: the base of --lora-name=a is not the one"),
        (push("c", factors(1)), "weights of 'c': this engine has adapters named a, b"),
    ):
        assert not answer.success and rule in answer.message
    with pytest.raises(WeightSyncError, match="weights of ''"):
        model.load_weights(factors(1).items())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert registry.told()["pushed"] == {}


def test_a_base_is_rounded_as_runs_push_it_and_adapters_are_left_alone():
    contract = dataclasses.replace(CONTRACT, dtype="bfloat16", weight_format="int4")
    given = {
        "layers.0.up_proj.weight": torch.randn(80, 48),
        "embed_tokens.weight": torch.randn(80, 48),
        **factors(1, torch.float32),
    }
    load = named_weights.rounding(contract)
    loaded = load(lambda _, weights: dict(weights), None, given.items())
    as_is = [(name, tensor.bfloat16()) for name, tensor in given.items()]
    (pushed,) = map(dict, rounded([as_is], "int4"))
    changed = {name for name, tensor in as_is if not torch.equal(loaded[name].bfloat16(), tensor)}
    assert changed == {"layers.0.up_proj.weight"}
    assert torch.equal(loaded["layers.0.up_proj.weight"], pushed["layers.0.up_proj.weight"])


def test_pushes_of_several_runs_may_cross():
    updater = SimpleNamespace(_session=None)

    def begin(updater, _):
        updater._session = object()

    named_weights._begin_once(begin, updater, None)
    opened = updater._session
    assert named_weights._begin_once(begin, updater, None).success
    assert named_weights._stay_open(updater, None).success and updater._session is opened
