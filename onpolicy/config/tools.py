"""The flags of `onpolicy verify`, `onpolicy bench`, `onpolicy serve` and `onpolicy report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from fallback_correction.ranges import at_least
from onpolicy.config import groups
from onpolicy.config.kinds import (
    Count,
    Directory,
    Engines,
    HeaderText,
    Port,
    Seed,
    Temperature,
    Threads,
)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Do both engines give a checkpoint's tokens the same log-probabilities, bit for bit?

    Samples with a real SGLang server (prompts share prefixes, prefill is chunked), trains one step,
    pushes the changed weights, samples again, and scores everything with the trainer in other batch
    shapes. Exit code 0 with true-on-policy mode only if not one token differs.
    """

    hf_checkpoint: str = ""
    """Local directory with the Hugging Face checkpoint. Required."""

    num_prompts: Count = 32
    """Prompts in each of the two rounds."""

    max_new_tokens: Count = 64
    """Tokens sampled for every prompt."""

    temperature: Temperature = 1.0
    """Sampling temperature."""

    seed: Seed = 0
    """Decides prompts and samples."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of both engines."""

    true_on_policy_mode: bool = True
    """Aligned operators; with --no-true-on-policy-mode the stock ones, whose mismatch is reported."""

    row_parallel_blocks: int = 0
    """Blocks into which aligned layers that tensor parallelism shares out cut their sums: a power of
    two. Runs with the same number have the same bits at any degree up to it. 0: the largest degree."""

    operators: Literal["auto", "triton", "hopper"] = "auto"
    """Aligned operators on a GPU: hopper (FlashAttention-3 and DeepGEMM; H100 and H200, bfloat16), or
    triton (A100 to H200, also float32). auto: hopper where it can, else triton; see the log."""

    train_backend: Literal["fsdp", "megatron"] = "fsdp"
    """Training engine: PyTorch's FSDP2, or Megatron-core with the --megatron-* flags."""

    megatron: Annotated[groups.MegatronConfig, tyro.conf.OmitArgPrefixes] = field(
        default_factory=groups.MegatronConfig
    )

    weight_sync: Literal["tensor", "distributed", "disk"] = "tensor"
    """Way of the changed weights to the server."""

    rollout_num_engines: Engines = 1
    """SGLang servers to start."""

    cpu_threads: Threads = 0
    """Threads for CPU operators of each process; 0 shares the cores."""

    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""

    json: str = ""
    """Also write the report into this file."""

    run_dir: Directory = "runs/verify"
    """Directory for the engines' logs."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Aligned and stock operators side by side in one run, alternating; medians of repetitions.

    `bench rollout` measures an SGLang server of each kind; `bench step` an optimizer step.
    """

    what: Annotated[Literal["rollout", "step"], tyro.conf.Positional]
    """What to measure."""

    hf_checkpoint: str = ""
    """Local directory with the Hugging Face checkpoint. Required."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype."""

    repetitions: Count = 5
    """Measurements of each kind, after one that is thrown away."""

    num_prompts: Count = 64
    """rollout: prompts sampled at once."""

    prompt_len: Count = 32
    """rollout: tokens per prompt."""

    max_new_tokens: Count = 96
    """Tokens sampled for every prompt, or trained on in every sequence."""

    train_backend: Literal["fsdp", "megatron", "fsdp,megatron"] = "fsdp"
    """step: the training engine; two are measured side by side, both on aligned operators."""

    num_tokens: Annotated[tuple[int, ...], at_least(1)] = (2048, 4096, 8192)
    """step: tokens per optimizer step; one measurement for each."""

    row_parallel_blocks: int = 0
    """Blocks into which aligned layers that tensor parallelism shares out cut their sums: a power of
    two. Runs with the same number have the same bits at any degree up to it. 0: the largest degree."""

    operators: Literal["auto", "triton", "hopper"] = "auto"
    """Aligned operators on a GPU: hopper (FlashAttention-3 and DeepGEMM; H100 and H200, bfloat16), or
    triton (A100 to H200, also float32). auto: hopper where it can, else triton; see the log."""

    cpu_threads: Threads = 0
    """Threads for CPU operators of each process; 0 takes all cores."""

    json: str = ""
    """Also write the result into this file."""

    run_dir: Directory = "runs/bench"
    """Directory for the engines' logs."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*; both servers get them."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Start one SGLang server under a contract and print how to connect to it.

    It serves runs with --rollout-server-url, and text: /v1/completions, /v1/chat/completions, /generate.
    """

    hf_checkpoint: str = ""
    """Local directory with the Hugging Face checkpoint. Required."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype."""

    true_on_policy_mode: bool = True
    """Aligned operators; with --no-true-on-policy-mode the stock ones."""

    row_parallel_blocks: int = 0
    """Blocks into which aligned layers that tensor parallelism shares out cut their sums: a power of
    two. Runs with the same number have the same bits at any degree up to it. 0: the largest degree."""

    operators: Literal["auto", "triton", "hopper"] = "auto"
    """Aligned operators on a GPU: hopper (FlashAttention-3 and DeepGEMM; H100 and H200, bfloat16), or
    triton (A100 to H200, also float32). auto: hopper where it can, else triton; see the log."""

    rollout_host: str = "127.0.0.1"
    """Address to listen on. Another than loopback needs --rollout-api-key."""

    rollout_base_port: Port = 0
    """Port; 0 takes a free one."""

    rollout_api_key: HeaderText = ""
    """API key that clients must send, or @ and a file that holds it; one is made up if there is none,
    and written into the run directory."""

    cpu_threads: Threads = 0
    """Threads for CPU operators; 0 takes all cores."""

    seed: Seed = 0
    """Seeds the samples of requests that bring no seed, in the order in which they arrive."""

    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""

    run_dir: Directory = "runs/serve"
    """Directory for the server's log."""

    sglang_args: tyro.conf.Suppress[tuple[str, ...]] = ()
    """SGLang's own flags, collected from --sglang-*."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write one HTML page with the curves of several runs over each other.

    Runs whose configuration differs only in the seed share a colour and get a bold median.
    """

    runs: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="RUN...", help_behavior_hint=""),
    ] = ()
    """Run directories of `onpolicy train`, or their metrics.jsonl files. At least one."""

    output: str = "report.html"
    """File to write. It needs nothing beside it and no network to be opened."""
