"""SGLang servers without processes or HTTP: what `SglangGroup` starts and talks to, in memory.

An engine samples from the weights that were pushed to it. It can be told in which of its calls it is
to die: then its weights and its prefix cache are gone, as those of a process, and whoever waits for
it learns that it is lost; or to hang: then it answers nothing. When it is started again it has the
checkpoint's weights.
"""

import asyncio
import base64
import contextlib
import pickle
import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from onpolicy.errors import ContractError, EngineError
from onpolicy.ops.kept_tokens import WHOLE
from onpolicy.ops.row_digests import row_digests
from onpolicy.rollout.client import EngineClient, EngineLostError
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.sample_requests import sampling_seed
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.trajectory import UNPUSHED, Completion, FinishReason, Span
from onpolicy.types import Request, SamplingParams
from onpolicy.weights.changes import restored
from onpolicy.weights.digest import WeightDigest
from tests.support.likeliest_bytes import packed
from tests.support.tiny_policy import ALIGNED, END, VOCAB_SIZE, make_weights, sample, score

SELF_CHECK = {"table": "00c0ffee"}
"""Digests of the operators that engines and trainer in memory share."""

CACHE_TOKENS = 1000
"""What an engine in memory says of its cache."""


def opened(body):
    """The tensors of a bucket that lies in shared memory."""
    assert body["load_format"] == "flattened_bucket"
    (handle,) = body["serialized_named_tensors"]
    bucket = pickle.loads(base64.b64decode(handle))
    data = bucket["flattened_tensor"]
    return {
        row.name: data[row.start_idx : row.end_idx].view(row.dtype).view(row.shape)
        for row in bucket["metadata"]
    }


class Memory:
    """What a server's process holds, and loses when it ends."""

    can_be_greedy = True
    """Whether top_k = 1 is heeded; no other filter is."""

    def __init__(self, contract):
        self.contract = contract
        self.weights, self.version = make_weights(), UNPUSHED
        self.prefixes = {}
        self.in_session = self.hangs = self.flips_a_bit = False
        self.aborts = 0
        self.loaded = []
        """Names of all that was pushed, in order."""
        self.came = []
        """The same names as they came: two for a tensor of which only changes came."""
        self.given_back = set()
        self._num_proved, self._digest = 0, WeightDigest().hexdigest()

    def report(self):
        return {
            "contract": self.contract.to_json(),
            "self_check": self.self_check(),
            "weights": self._proof(),
            "tp_size": 1,
            "cache_tokens": CACHE_TOKENS,
            "serves_text": True,
        }

    def self_check(self):
        return SELF_CHECK if self.contract.is_aligned else {}

    def _proof(self):
        """The digest of all that was pushed, as it was when first asked for since the last push."""
        if len(self.loaded) == self._num_proved:
            return self._digest
        self._num_proved, digest = len(self.loaded), WeightDigest()
        for name in {*self.loaded} & self.weights.keys():
            digest.add(name, self.weights[name])
        self._digest = digest.hexdigest()
        return self._digest

    def post(self, path, body):
        if path in ("/begin_weight_update", "/end_weight_update"):
            opens = path == "/begin_weight_update"
            if opens == self.in_session:
                raise EngineError(f"{path}: HTTP 400: in_session={self.in_session}")
            self.in_session = opens
        elif path == "/release_memory_occupation":
            self.give_back(set(body["tags"]))
        elif path == "/resume_memory_occupation":
            assert self.given_back >= set(body["tags"])
            self.given_back -= set(body["tags"])
        elif path == "/update_weights_from_disk":
            for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                self._load(load_file(file), int(body["weight_version"]))
        else:
            assert path == "/update_weights_from_tensor"
            self._load(opened(body), int(body["weight_version"]))

    def give_back(self, kinds):
        """What stood in that memory is gone."""
        assert not kinds & self.given_back
        self.given_back |= kinds
        if "kv_cache" in kinds:
            self.prefixes.clear()
        if "weights" in kinds:
            self.weights = {}

    def _load(self, weights, version):
        assert "weights" not in self.given_back
        self.came += weights
        for name, tensor in restored(weights.items(), lambda name: self.weights[name].clone()):
            if self.flips_a_bit:
                tensor = tensor.clone()
                tensor.view(torch.int32)[0, 0] ^= 1
                self.flips_a_bit = False
            self.loaded.append(name)
            self.weights[name] = tensor.clone()
        self.version = version

    def next_token(self, request, response):
        """A token, its log-probability, the set that it was drawn from (`ops/kept_tokens.py`), and the
        likeliest (`ops/likeliest_tokens.py`), as many as are asked for; the first may be of the prefix
        cache."""
        context, temperature = [*request.prompt_ids, *response], request.params.temperature
        scores = self.prefixes.get((temperature, *context))
        if scores is None:
            scores = self.score(context, temperature)
        if not response:
            self.prefixes[temperature, *context] = scores
        is_greedy = self.can_be_greedy and request.params.top_k == 1
        seed = request.sampling_seed
        if is_greedy:
            return (token := int(scores.argmax())), scores[token].item(), WHOLE, b""
        scores, kept = self.cut(context, scores, request.params)
        token = self.draw(scores, seed, len(context))
        told = scores.topk(request.params.num_likeliest)
        (likeliest,) = packed(told.indices[None].int().numpy(), told.values[None].numpy())
        return token, scores[token].item(), kept, likeliest

    def cut(self, context, scores, params):
        """The log-probabilities [V] of what filters leave to draw from, and what that is."""
        return scores, WHOLE

    def draw(self, scores, seed, place):
        """The token at a place of a sequence, of log-probabilities [V]."""
        return sample(scores, seed, place)

    def score(self, context, temperature):
        """Log-probabilities of the token after `context`: float32 [V]."""
        rounds = not self.contract.is_aligned
        return score(self.weights, context, temperature, is_rounded=rounds)


class Engine:
    """A server (`EngineServer`) and its client (`EngineClient`): the engine behind one URL.

    Its calls are counted from 1 on over all its lives, and its starts are calls too.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, spec, port, log_file):
        self.spec, self.port, self.log_file = spec, port, log_file
        self.dies_at = ()
        self.hangs_at = ()
        self.pause = lambda: 0.0
        """Seconds before a token."""
        self.url = f"http://127.0.0.1:{port}"
        self.calls = self.starts = 0
        self.answered = Counter()
        """How often which request was answered, in all lives."""
        self.memory = None
        self._lock = threading.Lock()

    @property
    def is_running(self):
        return self.memory is not None

    def start(self):
        self.memory, self.starts = self.new_memory(), self.starts + 1

    def new_memory(self):
        return Memory(self.spec.contract)

    def wait_until_healthy(self, timeout):
        with contextlib.suppress(EngineLostError), self._call():
            return
        raise EngineError(f"the engine at {self.url} ended with exit code 1 before it was ready.")

    def stop(self):
        self.memory = None

    def cause_of_death(self):
        return f"killed by the test in call {self.calls}"

    def log_tail(self, lines=12):
        return f"    died in call {self.calls}"

    @contextlib.contextmanager
    def _call(self, waits=False):
        """One call, in the memory of the process that takes it. `waits`: whatever it takes."""
        with self._lock:
            self.calls += 1
            if self.calls in self.dies_at:
                self.memory = None
            if (memory := self.memory) is None:
                raise EngineLostError(f"{self.url} is gone.")
            memory.hangs |= self.calls in self.hangs_at
            if memory.hangs and not waits:
                raise EngineLostError(f"{self.url}: no answer.")
            yield memory

    async def generate(self, session, request, takes_parts=False):
        if max(request.prompt_ids) >= self.vocab_size:
            raise ContractError(f"{self.url}/generate refused a request (HTTP 400)")
        with self._call(waits=True) as memory:
            prefix = (request.params.temperature, *request.prompt_ids)
            assert not memory.given_back
            num_cached = len(request.prompt_ids) * (prefix in memory.prefixes)
            aborts, aborted = memory.aborts, False
        response = []
        log_probs = []
        sets = []
        digests = []
        told = []
        params = request.params
        ends = () if params.ignore_eos else params.stop_token_ids
        while len(response) < params.max_new_tokens and not {*response[-1:]} & {*ends}:
            await asyncio.sleep(
                self.pause()
            )  # others take their turn, and the engine may die in it
            while memory.hangs:
                await asyncio.sleep(1.0)
            if self.memory is not memory:
                raise EngineLostError(f"{self.url} is gone.")
            if aborted := takes_parts and memory.aborts > aborts:
                break
            if self.spec.digests_rows:
                row = memory.score([*request.prompt_ids, *response], params.temperature)
                digests += row_digests(row[None]).tolist()
            token, log_prob, kept, likeliest = memory.next_token(request, response)
            response.append(token)
            log_probs.append(log_prob)
            sets.append(kept)
            told.append(likeliest)
        stopped = bool({*response[-1:]} & {*ends})
        self.answered[repr(request)] += 1
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Completion(
            response_ids=response,
            rollout_log_probs=log_probs,
            finish_reason=FinishReason.ABORT if aborted else reason,
            weight_version=memory.version,
            num_cached_tokens=num_cached,
            kept_tokens=sets if any(sets) else [],
            row_digests=digests,
            likeliest=told if any(told) else [],
            spans=(Span(version=memory.version, start=0, end=len(response)),),
        )

    async def abort(self, session):
        if self.memory is not None:
            self.memory.aborts += 1

    abort_when = EngineClient.abort_when

    async def is_healthy(self, session):
        if self.memory is None:
            raise EngineLostError(f"{self.url} is gone.")
        return not self.memory.hangs

    def patience(self, num_bytes):
        return 1.0

    def post(self, path, body, num_bytes=0):
        with self._call() as memory:
            memory.post(path, body)
        return {"success": True}

    def report(self):
        with self._call() as memory:
            return {**memory.report(), "digests_rows": self.spec.digests_rows}

    def flush_cache(self):
        with self._call() as memory:
            memory.prefixes.clear()


class Host:
    """Where engines run: makes servers, and clients for their URLs.

    `dies_at`: for the first servers that it makes, the calls in which they die.
    """

    def __init__(self, *dies_at):
        self.engines = []
        self.pause = lambda: 0.0
        self._dies_at = list(dies_at)

    def make_server(self, spec, port, log_file):
        engine = self.new_engine(spec, port or 30000 + len(self.engines), log_file)
        engine.pause = self.pause
        if self._dies_at:
            engine.dies_at = self._dies_at.pop(0)
        self.engines.append(engine)
        return engine

    def new_engine(self, spec, port, log_file):
        return Engine(spec, port, log_file)

    def specs(self, spec, config):
        return [spec] * config.rollout_num_engines

    def make_client(self, url, *_):
        return next(engine for engine in self.engines if engine.url == url)

    @property
    def num_restarts(self):
        return sum(max(engine.starts - 1, 0) for engine in self.engines)

    @property
    def answered(self):
        """How often each request was answered, by whichever engine."""
        return sum((engine.answered for engine in self.engines), Counter())

    def make_group(self, config, contract=ALIGNED, logs=Path("logs"), **changes):
        """A group of servers here, not started yet; `changes` are those of an `EngineSpec`."""
        spec = EngineSpec(
            hf_checkpoint="",
            contract=contract.of_engine,
            host="127.0.0.1",
            api_key="",
            seed=0,
            num_threads=1,
            max_concurrency=config.rollout_max_concurrency,
            cache_tokens=0,
            trust_remote_code=False,
            sglang_args=(),
        )
        specs = self.specs(replace(spec, **changes), config)
        make = {"make_server": self.make_server, "make_client": self.make_client}
        return SglangGroup(config, specs, logs, **make)


def make_requests(count, seed=0, max_new_tokens=6):
    """Different ones, whose responses end by themselves or at the limit."""
    params = SamplingParams(temperature=0.75, max_new_tokens=max_new_tokens, stop_token_ids=(END,))
    chance = random.Random(seed)
    return [
        Request(
            prompt_ids=[chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 5))],
            sampling_seed=sampling_seed(seed, i),
            params=params,
        )
        for i in range(count)
    ]
