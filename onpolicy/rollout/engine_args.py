"""Conversion of a contract into SGLang's flags and environment; the only module that knows both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from onpolicy.config import secrets
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.contract import (
    CONTRACT_VARIABLE,
    EXTENSIONS_VARIABLE,
    THREADS_VARIABLE,
    NumericsContract,
)
from onpolicy.system.network import (
    GLOO_INTERFACE,
    LOOPBACK_INTERFACE,
    is_loopback,
    proxy_exceptions,
)

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

    extensions: Mapping[str, str] = field(default_factory=dict)
    """The extensions that a command loads into the engine's processes
    (`sglang_patches/extensions.py`)."""

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
    ]  # fmt: skip


def _gpu_flags(spec: EngineSpec) -> list[str]:
    flags = ["--device", "cuda", "--base-gpu-id", str(spec.first_gpu)]
    if spec.contract.is_aligned:
        # Its bookkeeping for pages and CUDA graphs serves both backends (see sglang_patches/).
        flags += ["--attention-backend", "fa3", "--page-size", "1"]
    if spec.memory_fraction:
        flags += ["--mem-fraction-static", str(spec.memory_fraction), "--enable-memory-saver"]
    return [*flags, "--quantization", "fp8"] if spec.weight_format == "fp8_e4m3" else flags


def engine_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables of the server's processes, besides those of this process."""
    variables = {
        CONTRACT_VARIABLE: spec.contract.to_json(),
        THREADS_VARIABLE: str(spec.num_threads),
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
