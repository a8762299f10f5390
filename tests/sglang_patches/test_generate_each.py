"""Requests of one call, each answered when it is done, by SGLang's own collecting of a batch."""

import asyncio
import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest
from fastapi import HTTPException

from sglang_patches import generate_each
from sglang_patches.generate_each import _ask, _batch_of, _lines, _packed, _refused, _tell_each

PARAMS = {"temperature": 1.0, "max_new_tokens": 2}


def body(*requests):
    asked = [{"sampling_params": PARAMS, **each} for each in requests]
    for each in asked:
        each["input_ids"] = base64.b64encode(np.array(each["input_ids"], "<i4")).decode()
    return json.dumps({"requests": asked}).encode()


def numbers(encoded, dtype):
    return np.frombuffer(base64.b64decode(encoded), dtype=dtype).tolist()


def answer(token, log_prob=-0.5):
    pairs = [(log_prob, token, None)]
    return {"output_ids": [token], "meta_info": {"output_token_logprobs": pairs, "id": "x"}}


class Manager:
    """A tokenizer manager whose requests are answered when `done` says so; an exception is raised."""

    def __init__(self, answers):
        self.answers, self.done = answers, [asyncio.Event() for _ in answers]

    async def generate_request(self, batch, request):
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        collect = TokenizerManager._collect_batch_responses
        collect = getattr(collect, "__wrapped__", collect)
        generators = [self._answer(i) for i in range(len(batch.input_ids))]
        yield await _tell_each(collect, self, generators)

    async def _answer(self, place):
        await self.done[place].wait()
        if isinstance(self.answers[place], Exception):
            raise self.answers[place]
        yield self.answers[place]


def told_by(manager, count):
    """The lines of a call of `count` requests; `order`: which is done next, when asked for a line."""
    told, news = [], asyncio.Event()

    async def read():
        return body(*({"input_ids": [i]} for i in range(count)))

    def hear(*each):
        told.append(each)
        news.set()

    asking = asyncio.create_task(_ask(manager, SimpleNamespace(body=read), hear))
    asking.add_done_callback(lambda _: news.set())
    return asking, _lines(asking, told, news)


def test_each_is_told_when_it_is_done_and_what_is_done_together_in_one_line():
    async def run():
        manager = Manager([answer(5), answer(6), answer(7)])
        asking, lines = told_by(manager, 3)
        manager.done[1].set()
        ((place, status, said),) = json.loads(await anext(lines))
        assert (place, status, numbers(said["output_ids"], "<i4")) == (1, 200, [6])
        assert not asking.done()
        manager.done[0].set(), manager.done[2].set()
        assert [each[0] for each in json.loads(await anext(lines))] == [0, 2]
        assert [line async for line in lines] == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("too long"), 400), (HTTPException(503, "too long"), 503)]
)
def test_what_one_request_fails_of_is_its_own_answer_and_the_others_go_on(error, status):
    async def run():
        manager = Manager([error, answer(6)])
        _, lines = told_by(manager, 2)
        manager.done[0].set()
        assert json.loads(await anext(lines)) == [[0, status, {"error": {"message": "too long"}}]]
        manager.done[1].set()
        assert [each[:2] for each in json.loads(await anext(lines))] == [[1, 200]]

    asyncio.run(run())


def test_a_client_that_leaves_ends_the_asking():
    async def run():
        manager = Manager([answer(5), answer(6)])
        asking, lines = told_by(manager, 2)
        manager.done[0].set()
        await anext(lines)
        await lines.aclose()
        await asyncio.wait([asking])
        assert asking.cancelled()

    asyncio.run(run())


def test_a_batch_that_nobody_hears_of_is_collected_as_sglang_does_it():
    generators = [object()]
    assert _tell_each(lambda manager, given: given, None, generators) is generators


def test_log_probabilities_keep_their_bits_and_tokens_without_one_are_left_out():
    values = np.array([-0.1, -1e-45, -0.3, -0.0, -np.inf], "<f4").tolist()
    given = answer(1)
    given["meta_info"]["output_token_logprobs"] = [
        *((value, i, None) for i, value in enumerate(values)),
        (None, 9, None),
    ]
    found = _packed(given)["meta_info"]
    log_probs, tokens = found["output_token_logprobs"]
    assert numbers(log_probs, "<i4") == np.array(values, "<f4").view("<i4").tolist()
    assert numbers(tokens, "<i4") == [0, 1, 2, 3, 4]
    assert given["meta_info"]["output_token_logprobs"][-1] == (
        None,
        9,
        None,
    )  # SGLang keeps its own


def test_a_batch_has_what_its_requests_ask_for():
    batch = _batch_of(body({"input_ids": [1]}, {"input_ids": [2, 3]}))
    assert (batch.input_ids, batch.sampling_params) == ([[1], [2, 3]], [PARAMS, PARAMS])
    assert batch.return_logprob is True and batch.return_routed_experts is False
    batch = _batch_of(body({"input_ids": [1]}, {"input_ids": [2], "return_routed_experts": True}))
    assert batch.return_routed_experts is True


@pytest.mark.parametrize(
    "given",
    [
        b"[", b"[]", b"{}", b'{"requests": [3]}', b'{"requests": [{"input_ids": "AQAAAA=="}]}',
        b'{"requests": [{"input_ids": [1], "sampling_params": {}}]}',
        b'{"requests": [{"input_ids": "AQAA", "sampling_params": {}}]}',
        b'{"requests": [{"input_ids": "AQ-AAAA==", "sampling_params": {}}]}',
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_read_is_refused_with_the_rule(given):
    with pytest.raises(ValueError, match="must be an object with a list of requests") as refused:
        _batch_of(given)
    assert _refused(refused.value).status_code == 400


def test_the_call_is_one_of_sglangs_application():
    from sglang.srt.entrypoints.http_server import app

    before = [*app.router.routes]
    try:
        generate_each._add_route()
        assert [r.path for r in app.router.routes if r not in before] == [generate_each.PATH]
    finally:
        app.router.routes[:] = before
