"""`POST /generate_each`: requests in one call, each answered as soon as it is done. In every
contract.

A call to /generate costs this process and its client more than an answer of a few tokens does, and
often a prefill of its own. /generate takes lists, but answers when the last of them is done, or with
a chunk for every token.

Here the body is `{"requests": [...]}`, each as for /generate. The answer is lines of JSON, each a
list of [index, HTTP status, answer] of requests that finished at about the same time. Tokens are
little-endian numbers in base64, in an answer and in a request: `input_ids` and `output_ids` int32, and
`output_token_logprobs` the values, float32 as they were computed, and their tokens, int32. So are
`output_top_logprobs`, the k of every token after each other, where `top_logprobs_num` asks. A request
that this process refuses before it begins refuses the whole call.

Public reports: sgl-project/sglang #6553 and #29367 (this process limits many short requests) and
#31960 (numbers as text cost four times what base64 does), vllm-project/vllm #57442 (an object for
each token's log-probability costs a third of the throughput). Can go when SGLang has such a call.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from sglang_patches import registry

PATH = "/generate_each"

SERVER_TARGET = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
COLLECT_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._collect_batch_responses"

Hear = Callable[[int, int, Any], None]
"""A callback for (index, HTTP status, answer)."""

_hears: ContextVar[Hear | None] = ContextVar("_hears", default=None)


def install() -> None:
    registry.hook(SERVER_TARGET, _add_route, "before")
    registry.hook(COLLECT_TARGET, _tell_each, "around")


def _add_route(*_: Any, **__: Any) -> None:
    from sglang.srt.entrypoints.http_server import app
    from starlette.routing import Route

    app.router.routes.append(Route(PATH, _generate_each, methods=["POST"]))


async def _generate_each(request: Any) -> Any:
    from sglang.srt.entrypoints.http_server import _global_state
    from starlette.responses import StreamingResponse

    told: list[tuple[int, int, Any]] = []
    news = asyncio.Event()

    def hear(*answer: Any) -> None:
        told.append(answer)
        news.set()

    asking = asyncio.create_task(_ask(_global_state.tokenizer_manager, request, hear))
    asking.add_done_callback(lambda _: news.set())
    await news.wait()
    if asking.done() and (error := asking.exception()):
        return _refused(error)
    return StreamingResponse(_lines(asking, told, news), media_type="application/x-ndjson")


async def _ask(manager: Any, request: Any, hear: Hear) -> None:
    _hears.set(hear)  # in the context of this task alone
    batch = _batch_of(await request.body())
    async for _ in manager.generate_request(batch, request):
        pass


def _batch_of(body: bytes) -> Any:
    """Return SGLang's request object for several requests."""
    import orjson
    from sglang.srt.managers.io_struct import GenerateReqInput

    try:
        asked = orjson.loads(body)["requests"]
        return GenerateReqInput(
            input_ids=[_tokens(each["input_ids"]) for each in asked],
            sampling_params=[each["sampling_params"] for each in asked],
            return_logprob=True,
            return_routed_experts=any(each.get("return_routed_experts") for each in asked),
            top_logprobs_num=[int(each.get("top_logprobs_num", 0)) for each in asked],
        )
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{PATH}: the body cannot be read ({error!r}): it must be an object with a list of "
            "requests, each with input_ids, int32 in base64, and sampling_params. Ask /generate for "
            "anything else."
        ) from error


def _tell_each(original: Any, manager: Any, generators: list[AsyncIterator[Any]]) -> Any:
    """Pass on the answers to a batch's requests without waiting for the last."""
    if (hear := _hears.get()) is not None:
        generators = [_told(answers, hear, place) for place, answers in enumerate(generators)]
    return original(manager, generators)


async def _told(answers: AsyncIterator[Any], hear: Hear, place: int) -> AsyncIterator[Any]:
    try:
        answer = _packed(await anext(answers))
    except Exception as error:  # an error of this request alone: SGLang would give up the others
        status, answer = _reason(error)
        hear(place, status, answer)
    else:
        hear(place, 200, answer)
    yield answer


def _packed(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of /generate with its tokens, as far as scored, as bytes."""
    meta = answer["meta_info"]
    pairs = [p for p in meta.get("output_token_logprobs") or () if p[0] is not None]
    meta = {**meta, "output_token_logprobs": _numbers(pairs)}
    if rows := meta.get("output_top_logprobs"):
        meta["output_top_logprobs"] = _numbers([pair for row in rows for pair in row or ()])
    return {**answer, "output_ids": _base64("<i4", answer["output_ids"]), "meta_info": meta}


def _numbers(pairs: list[Any]) -> tuple[str, str]:
    """Return the log-probabilities and the tokens of SGLang's triples (log-probability, token, text)."""
    return _base64("<f4", [p[0] for p in pairs]), _base64("<i4", [p[1] for p in pairs])


def _tokens(encoded: str) -> list[int]:
    found: list[int] = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4").tolist()
    return found


def _base64(dtype: str, values: list[Any]) -> str:
    return base64.b64encode(np.array(values, dtype=dtype).tobytes()).decode()


async def _lines(
    asking: asyncio.Task[None], told: list[tuple[int, int, Any]], news: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yield lines of answers until all are there; if the client leaves, cancel the requests."""
    import orjson

    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    try:
        while told or not asking.done():
            await news.wait()
            news.clear()
            ready, told[:] = [*told], []
            if ready:
                yield orjson.dumps(ready, option=options) + b"\n"
    finally:
        asking.cancel()


def _refused(error: BaseException) -> Any:
    from starlette.responses import JSONResponse

    status, answer = _reason(error)
    return JSONResponse(answer, status)


def _reason(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer that /generate gives for an error."""
    status = getattr(error, "status_code", 400 if isinstance(error, ValueError) else 500)
    message = getattr(error, "detail", None) or str(error)
    return int(status), {"error": {"message": message}}
