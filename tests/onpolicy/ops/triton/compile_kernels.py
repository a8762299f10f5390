"""Compiles what the operators would launch on a GPU, on a machine that has none.

    python compile_kernels.py 80 90 > kernels.json

Calls the operators on tensors without data, at the sizes of real models, and has Triton compile
every launch for GPUs of the given compute capabilities, down to machine code, instead of launching.
Processes of their own, one for each: the tests' process interprets kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))

import torch.nn.functional as F
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from onpolicy.ops import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.log_probs import Head, VocabParallel, token_log_probs
from onpolicy.ops.recurrence import RecurrentLayout, state_rows
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.ops.triton import TritonOperators, attention, linear
from onpolicy.weights.xxh3_kernels import add_up_blocks, chain_blocks

OPERATORS = TritonOperators()
MMA = re.compile(r"(wgmma\.mma_async|mma)\.sync\.aligned\.m(\d+)n\d+k(\d+)|(tcgen05\.mma)\.cta")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
IN_FLIGHT = re.compile(r"pendings = (\d+)")
SLOTS = re.compile(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x")


class AbsentGPU:
    """Triton's idea of the current device."""

    def __init__(self, arch: int):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def compile_launches(arch: int) -> dict[str, dict[str, Any]]:
    """From now on launches compile; returns what is known of each kernel, by a hash."""
    kernels: dict[str, dict[str, Any]] = {}
    launch = jit.JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        kernels[kernel.hash] = {
            "name": kernel.name,
            "shared": kernel.metadata.shared,
            **usage(kernel.asm["cubin"]),
            "options": {k: str(v) for k, v in options.items()},
            "instructions": sorted(
                {"x".join(filter(None, m)) for m in MMA.findall(kernel.asm["ptx"])}
            ),
            "fused": kernel.metadata.enable_fp_fusion,
            "slots": min(map(int, SLOTS.findall(kernel.asm["ttgir"])), default=1),
            "copies_ahead": "cp.async." in kernel.asm["ptx"],
            "overwrites": overwrites(kernel.asm["ttgir"], kernel.metadata.num_stages),
        }
        return kernel

    driver.set_active(AbsentGPU(arch))
    jit.JITFunction.run = compiled
    linear.capability = attention.capability = lambda _: arch
    return kernels


def overwrites(ttgir: str, num_stages: int) -> bool:
    """Whether a loop copies a tile over one that a product may still be reading.

    Tiles are copied num_stages - 1 turns ahead, so a product that is in flight while the next turn
    copies needs one slot more. Triton 3.6 and 3.8 forget it where two products take an operand.
    """
    in_flight = max(map(int, IN_FLIGHT.findall(ttgir)), default=0)
    return in_flight > 0 and min(map(int, SLOTS.findall(ttgir)), default=num_stages) < num_stages


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, to which the compiler spills what has none."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = USAGE.search(said)
    assert found is not None, said
    return dict(zip(("registers", "stack"), map(int, found.groups()), strict=True))


def launch_all(dtype: torch.dtype) -> None:
    tensor = partial(torch.empty, device="meta", dtype=dtype)
    training = partial(tensor, requires_grad=True)
    for rows in (1, 17, 33, 65):
        OPERATORS.linear(tensor(rows, 4096), tensor(1024, 4096), tensor(1024))
    OPERATORS.partial_linear(tensor(100, 4096), tensor(1024, 4096))
    for rows, blocks in ((1, 2), (100, 8), (8192, 4), (8192, 8)):
        row_parallel = RowParallel(blocks)
        OPERATORS.row_parallel_linear(
            tensor(rows, 4096), tensor(5120, 4096), tensor(5120), row_parallel
        )
    launch_experts(tensor, training)
    launch_attention(tensor, training, dtype)
    launch_delta_rule(tensor)
    if dtype != torch.float32:  # it makes no difference to what follows
        launch_hashes()
        for size in (128, 7168):
            for round_last in (False, True):
                x, weight = training(300, size), training(size)
                OPERATORS.rms_norm(x, weight, 1e-6, round_last).sum().backward()
            OPERATORS.layer_norm(x, weight, training(size), 1e-6).sum().backward()
        launch_elementwise(tensor, training)


def launch_experts(tensor: Any, training: Any) -> None:
    offsets = torch.empty(129, dtype=torch.int64, device="meta")
    for rows in (8, 8192):
        OPERATORS.grouped_partial_linear(tensor(rows, 768), tensor(128, 2048, 768), offsets)
    out = OPERATORS.grouped_linear(training(8192, 2048), training(128, 1536, 2048), offsets)
    out.sum().backward()
    probabilities = OPERATORS.softmax(training(100, 128))
    OPERATORS.topk(probabilities, 8)[0].sum().backward()


def launch_attention(tensor: Any, training: Any, dtype: torch.dtype) -> None:
    layout = AttentionLayout.packed((150, 50), "meta")
    lens = torch.empty(5, dtype=torch.int32, device="meta")
    decoding = PagedLayout(
        page_table=torch.empty(4, 16, dtype=torch.int32, device="meta"),
        page_size=64,
        key_lens=lens[:4],
        query_starts=lens,
        max_query_len=1,
    )
    # In float32 the widest alone: its kernels take long to compile, and the most memory.
    for dim in (64, 128, 256) if dtype != torch.float32 else (256,):
        q, k, v = training(200, 32, dim), training(200, 8, dim), training(200, 8, dim)
        OPERATORS.attention(q, k, v, layout, ScoreRule(0.1)).sum().backward()
        if dim == 128:
            special = ScoreRule(0.1, window=33, softcap=20.0, sinks=training(32))
            OPERATORS.attention(q, k, v, layout, special).sum().backward()
        stores = tensor(9, 64, 8, dim), tensor(9, 64, 8, dim)
        OPERATORS.paged_attention(tensor(4, 32, dim), *stores, decoding, ScoreRule(0.1))


@torch.no_grad()
def launch_delta_rule(tensor: Any) -> None:
    """Whole sequences, an extension and decode steps: the sizes of Qwen3-Next, and smaller ones."""
    training = RecurrentLayout.packed((150, 50))
    slots = torch.empty(4, dtype=torch.int64, device="meta")
    decoding = RecurrentLayout(query_lens=(1,) * 4, past_lens=(9, 64, 63, 500), slots=slots)
    extending = RecurrentLayout(query_lens=(30, 65), past_lens=(0, 77), slots=slots[:2])
    single = partial(torch.empty, device="meta")
    for key_heads, heads, dim in ((16, 32, 128), (3, 3, 40)):
        channels = (2 * key_heads + heads) * dim
        states = single(4, heads, state_rows(dim, dim), dim), tensor(4, 3, channels)
        for layout, (held, convolved) in (
            (training, (None, None)), (decoding, states), (extending, states)
        ):  # fmt: skip
            tokens = sum(layout.query_lens)
            x = tensor(tokens, channels)
            OPERATORS.causal_conv(x, tensor(channels, 4), None, layout, convolved)
            q, k, v = x.unflatten(1, (-1, dim)).split((key_heads, key_heads, heads), 1)
            rates = single(tokens, heads), tensor(tokens, heads)
            OPERATORS.gated_delta(q, k, v, *rates, layout, held)


def launch_hashes() -> None:
    words = partial(torch.empty, device="meta", dtype=torch.int64)
    sums = [add_up_blocks(words(128 * blocks), words(24)) for blocks in (1, 5000)]
    chain_blocks(sums, words(2, 24), words(8))


def launch_elementwise(tensor: Any, training: Any) -> None:
    OPERATORS.gated(F.silu, *training(100, 2 * 1536).chunk(2, -1)).sum().backward()
    rotated = OPERATORS.rotary(
        training(1, 32, 100, 128),
        training(1, 8, 100, 128),
        tensor(1, 100, 128),
        tensor(1, 100, 128),
    )
    (rotated[0].sum() + rotated[1].sum()).backward()
    targets = torch.empty(100, dtype=torch.int64, device="meta")
    temperature = torch.empty(100, device="meta")
    hidden, weight = training(100, 1024), training(151936, 1024)
    head = Head(OPERATORS, weight, None, VocabParallel(len(weight)))
    token_log_probs(head, hidden, targets, temperature)[0].sum().backward()
    log_probs = OPERATORS.log_softmax(tensor(100, 151936), temperature[:, None])
    OPERATORS.sample(log_probs, OPERATORS.uniform(targets, targets))


def kernels_for(arch: int) -> list[dict[str, Any]]:
    kernels = compile_launches(arch)
    # float32 uses no tensor cores, so one generation stands for all.
    for dtype in (torch.bfloat16, torch.float32) if arch == 80 else (torch.bfloat16,):
        launch_all(dtype)
        for kernel in kernels.values():
            kernel.setdefault("dtype", str(dtype).removeprefix("torch."))
    return list(kernels.values())


if __name__ == "__main__":
    with ProcessPoolExecutor(
        mp_context=get_context("fork")
    ) as pool:  # which have imported all this
        print(json.dumps(list(pool.map(kernels_for, map(int, sys.argv[1:])))))
