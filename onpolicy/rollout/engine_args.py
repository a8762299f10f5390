"""Conversion of a contract into SGLang's flags and environment; the only module that knows both.

Before any server is started, SGLang itself checks the user's --sglang-* flags (`FlagCheck`): in a
process of its own, while other inputs are read, since importing SGLang takes seconds.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from onpolicy.config import secrets
from onpolicy.config.secrets import hide
from onpolicy.config.sglang_flags import PREFIX, chunked_prefill_size, tensor_parallel_size
from onpolicy.contract import (
    CONTRACT_VARIABLE,
    DIGESTS_VARIABLE,
    EXTENSIONS_VARIABLE,
    THREADS_VARIABLE,
    NumericsContract,
)
from onpolicy.errors import ConfigError, EngineError
from onpolicy.images.family import BOTH_WAYS
from onpolicy.system.network import (
    GLOO_INTERFACE,
    LOOPBACK_INTERFACE,
    is_loopback,
    proxy_exceptions,
)

logger = logging.getLogger(__name__)

CORES_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
"""The cores of each rank; without it SGLang allows only as many ranks on a CPU as NUMA nodes."""

MEMORY_FRACTION = "0.95"

MAX_CONCURRENCY = 256

CONTEXT_MARGIN = 2
"""Tokens that SGLang keeps free at the end of the context."""

CACHE_MARGIN = 8
"""Tokens of the KV cache that SGLang keeps free beside a sequence (tp_worker.get_worker_info)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The parameters of one SGLang server."""

    hf_checkpoint: str
    contract: NumericsContract
    host: str
    api_key: str
    """The key of runs, valid for every call (`sglang_patches/who_may_ask.py`)."""

    client_api_key: str = ""
    """A key valid for sampling alone; empty: there is none, or SGLang's own flags give the key of
    control calls, and `api_key` is not valid for those."""

    seed: int
    num_threads: int
    max_concurrency: int = MAX_CONCURRENCY
    """The most requests in flight."""

    cache_tokens: int = 0
    """The size of the KV cache in tokens; 0 takes what the GPU has room for."""

    state_slots: int = 0
    """The most states of recurrent layers in memory, of running requests and cached; 0: the model has
    none, or as many as the GPU has room for."""

    longest_sequence: int = 0
    """The longest prompt and response in tokens that must fit the cache; 0: not known."""

    number: int = 0
    """The index of the engine among a command's engines, from 0."""

    node: str = ""
    """The host to start on: a host of the cluster by its Ray node id; empty: this host."""

    first_gpu: int = 0
    """The first GPU of this engine, where there are any."""

    memory_fraction: float = 0.0
    """The fraction of each GPU for weights and cache of a server that shares it with the trainer
    and releases them on request (--colocate); 0: it shares none, and SGLang decides."""

    weight_format: str = ""
    """--rollout-weight-format, where SGLang quantizes the weights itself."""

    returns_routed_experts: bool = False
    """Whether the engine records the experts of each token, for requests that ask."""

    digests_rows: bool = False
    """Whether the engine digests the log-probabilities of the whole vocabulary at each token."""

    extensions: Mapping[str, str] = field(default_factory=dict)
    """The extensions that a command loads into the engine (`sglang_patches/extensions.py`)."""

    serves_text: bool = False
    """Whether clients may send text, as through the OpenAI API; a run sends tokens."""

    trust_remote_code: bool
    sglang_args: tuple[str, ...]
    """The user's own flags for SGLang; they come last."""

    @property
    def sglang_secrets(self) -> dict[str, str]:
        """The secrets among those flags."""
        given = secrets.split(self.sglang_args)[1]
        return {flag: secrets.reveal(flag, value) for flag, value in given.items()}

    @property
    def tp_size(self) -> int:
        """The number of tensor-parallel ranks of the server."""
        return tensor_parallel_size(self.sglang_args)

    @property
    def needed_tokens(self) -> int:
        """The tokens that the cache of any engine must hold, whoever started it: one sequence."""
        return self.longest_sequence and self.longest_sequence + CACHE_MARGIN

    @property
    def admin_api_key(self) -> str:
        """The key for weights and other control calls that SGLang's own flags give; empty: none."""
        return self.sglang_secrets.get(secrets.ADMIN_KEY, "")


def engine_flags(spec: EngineSpec, port: int) -> list[str]:
    """Return SGLang's command line for this server, without the secrets."""
    flags = [
        "--model-path", spec.hf_checkpoint,
        "--host", spec.host,
        "--port", str(port),
        "--dtype", spec.contract.dtype,
        "--random-seed", str(spec.seed),
        # SGLang counts a request whose prompt is cut into chunks twice, and then lets one wait for
        # another to end (Scheduler._get_new_batch_prefill_raw).
        "--max-running-requests", str(spec.max_concurrency + 1),
        # Not the checkpoint's own top_p and top_k, which an aligned engine would refuse.
        *(["--sampling-defaults", "openai"] if spec.serves_text else ["--skip-tokenizer-init"]),
        "--grammar-backend", "none",
        "--log-level", "info",
        "--sleep-on-idle",
        "--skip-server-warmup",  # it sleeps for a second before its one request; ours is the same
        *(_cpu_flags(spec) if spec.contract.device == "cpu" else _gpu_flags(spec)),
    ]  # fmt: skip
    if spec.trust_remote_code:
        flags.append("--trust-remote-code")
    if spec.contract.context is not None:
        flags += ["--context-length", str(spec.contract.context)]
    if spec.returns_routed_experts:
        flags.append("--enable-return-routed-experts")
    if spec.contract.is_aligned:
        flags += [
            "--model-impl", "transformers",
            "--disable-hybrid-swa-memory",  # the cache keeps every key: windows are a rule on positions
            "--enable-deterministic-inference",
            "--sampling-backend", "pytorch",
        ]  # fmt: skip
    if spec.contract.images in BOTH_WAYS:
        if (size := chunked_prefill_size(spec.sglang_args) or 0) > 0:
            raise ConfigError(
                f"--sglang-chunked-prefill-size={size}: a chunk may end within an image, whose tokens "
                "see each other. Leave it out."
            )
        flags += ["--chunked-prefill-size", "-1"]
    return [*flags, *secrets.split(spec.sglang_args)[0]]


def secret_flags(spec: EngineSpec) -> list[str]:
    """Return the secret flags, kept out of the command line, which every user of a host can read."""
    given = {"--api-key": spec.client_api_key or spec.api_key}
    if spec.client_api_key:
        given[secrets.ADMIN_KEY] = spec.api_key
    given |= spec.sglang_secrets
    return [f"{flag}={value}" for flag, value in given.items()]


def _cpu_flags(spec: EngineSpec) -> list[str]:
    return [
        "--device", "cpu",
        "--attention-backend", "torch_native",
        "--disable-overlap-schedule",
        # A share of the memory that is free for weights and cache; the next flag says how much of
        # it the cache takes. Where that is not there, the server reports less, and is refused.
        "--mem-fraction-static", MEMORY_FRACTION,
        "--max-total-tokens", str(spec.cache_tokens),
        *(["--max-mamba-cache-size", str(spec.state_slots)] if spec.state_slots else ()),
    ]  # fmt: skip


def _gpu_flags(spec: EngineSpec) -> list[str]:
    flags = ["--device", "cuda", "--base-gpu-id", str(spec.first_gpu)]
    if spec.contract.is_aligned:
        # Its bookkeeping for pages and CUDA graphs serves both backends (see sglang_patches/).
        flags += ["--attention-backend", "fa3", "--page-size", "1"]
    if spec.contract.images:
        flags.append("--disable-cuda-graph")  # sglang_patches/layer_images.py
    if spec.contract.is_aligned and spec.contract.shapes.delta:
        # A pass after a request's end would write into the state that SGLang then caches, and CUDA
        # graphs cannot hold the layout of its layers (sglang_patches/layer_recurrence.py).
        flags += ["--disable-overlap-schedule", "--disable-cuda-graph"]
    if spec.memory_fraction:
        flags += ["--mem-fraction-static", str(spec.memory_fraction), "--enable-memory-saver"]
    return [*flags, "--quantization", "fp8"] if spec.weight_format == "fp8_e4m3" else flags


def engine_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables of the server's processes, besides this process's own."""
    variables = {
        CONTRACT_VARIABLE: spec.contract.to_json(),
        THREADS_VARIABLE: str(spec.num_threads),
        DIGESTS_VARIABLE: "1" if spec.digests_rows else "",
        "OMP_NUM_THREADS": str(spec.num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **_gloo_interface(spec.host),
        # SGLang asks its own server for a token before it serves.
        **proxy_exceptions(os.environ, spec.host),
        **spec.contract.variables,
    }
    if spec.extensions:
        variables[EXTENSIONS_VARIABLE] = json.dumps(dict(spec.extensions))
    if spec.contract.device == "cpu":
        variables["SGLANG_PLATFORM"] = "onpolicy_cpu"
        ranks = tensor_parallel_size(spec.sglang_args)
        if ranks > 1 and CORES_VARIABLE not in os.environ:
            variables[CORES_VARIABLE] = "|".join(_cores_of_ranks(ranks))
        if spec.contract.is_aligned:
            # SGLang compiles a few functions of integers, which takes seconds and a C++ compiler.
            variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def _gloo_interface(host: str) -> dict[str, str]:
    given = os.environ.get(GLOO_INTERFACE, "")
    if is_loopback(host):
        return {GLOO_INTERFACE: given or LOOPBACK_INTERFACE}
    # The trainer may have chosen loopback for itself; gloo takes an empty value for none.
    return {GLOO_INTERFACE: given if given != LOOPBACK_INTERFACE else ""}


def _cores_of_ranks(ranks: int) -> list[str]:
    """Return equal parts of this host's cores; with fewer cores than ranks, ranks share them."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    each = max(1, len(cores) // ranks)
    cores *= ranks
    return [",".join(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)]


def require_cache(spec: EngineSpec) -> None:
    """Raise ConfigError if a sequence does not fit the requested cache; log if requests have to wait."""
    needed, tokens = spec.needed_tokens, spec.cache_tokens
    if not tokens:
        return  # as much as a GPU has room for, which its server tells when it has started
    if needed > tokens:
        raise ConfigError(
            f"--sglang-max-total-tokens={tokens}: the longest prompt and response have "
            f"{spec.longest_sequence} tokens, and with {needed - spec.longest_sequence} that SGLang "
            f"keeps free they need {needed}. Raise it, or leave it out."
        )
    if spec.max_concurrency * needed > tokens:
        logger.info(
            "a server's cache of %d tokens holds %d sequences of %d tokens, the longest that may come; "
            "of %d requests in flight the others wait for room",
            tokens, tokens // needed, spec.longest_sequence, spec.max_concurrency,
        )  # fmt: skip


ANSWER = '{"refused":'
"""The beginning of the line that `sglang_patches.check_flags` answers with, among SGLang's own."""

ANY_PORT = 30000
"""A placeholder for the server's port, which the check does not open."""


class FlagCheck:
    """A check under way; as a context manager it leaves no process behind."""

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        self._process: subprocess.Popen[str] | None = None
        if spec.sglang_args:  # the flags that onpolicy itself chooses are known to be good
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_patches.check_flags", *engine_flags(spec, ANY_PORT)],
                env={**os.environ, **engine_environment(spec)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def require_passed(self) -> None:
        """Wait for the answer. Raises ConfigError if it is no, EngineError if there is none."""
        if self._process is None:
            return
        output, log = self._process.communicate(json.dumps(secret_flags(self._spec)))
        answers = [line for line in output.splitlines() if line.startswith(ANSWER)]
        if not answers:
            tail = "\n".join(log.splitlines()[-12:])
            raise EngineError(
                f"SGLang could not be asked about its flags. The end of its log:\n{tail}"
            )
        refused = json.loads(answers[-1])["refused"]
        if refused is None:
            return
        given = " ".join(arg.replace("--", PREFIX, 1) for arg in hide(self._spec.sglang_args))
        reason = refused if refused.startswith(PREFIX) else f"{given}: {refused}"
        raise ConfigError(f"{reason} Correct the flag, or leave it out.")
