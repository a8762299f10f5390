"""Decoding steps of engines in their own process, without HTTP and without a scheduler.

    python -m benchmarks.gpu_quarter.decode_steps --kinds stock,hopper --cells 1x1024,8x8192

Every engine is SGLang's model runner with the flags, the environment and the plug-in of a server of
`onpolicy bench decode`; `sglang.benchmark.one_batch` makes it and captures its steps. Weights are
random and made in place. Models of two depths give the time of a layer and of the rest, and so the
time of the whole model (`quarter_page.py`). Engines load side by side; they are measured one after
another.

`step_ms` is a whole step and a synchronization, with the host's work before each; `forward_ms` is
the model's part alone, queued, and `is_captured` says whether a CUDA graph was replayed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.gpu_quarter.result_lines import claim_output, write_line
from onpolicy.compat.process import prepare_process

DETERMINISTIC = "deterministic"
STEPS, WARM_STEPS = 30, 5
PREFILL = 16384
"""The most tokens that are prefilled at once, on a GPU; SMALL_PREFILL in a rehearsal."""
SMALL_PREFILL = 64
PATIENCE = 75.0
"""Seconds that an engine waits for others to load before it measures beside them."""
MARGIN = 64
"""Tokens of the cache for each sequence beside its context: the steps, and what SGLang keeps free."""
LAST_CHARACTERS = 800
"""Characters kept of a failed engine's log."""
KERNELS = 12
"""The most kernels of a profile."""

Cell = tuple[int, int]
"""Sequences, and tokens of the context of each."""


def cells_of(text: str) -> list[Cell]:
    pairs = (cell.split("x") for cell in text.split(","))
    return [(int(batch), int(context)) for batch, context in pairs]


def engine(kind: str, model: str, cells: Sequence[Cell]) -> tuple[list[str], dict[str, str]]:
    """Return SGLang's flags and environment for one kind of engine: `stock`, `deterministic`, or a
    backend of aligned operators."""
    from transformers import AutoConfig

    from onpolicy.bench.cells import fit_decode
    from onpolicy.bench.setting import setting
    from onpolicy.cli.parse import parse
    from onpolicy.config.tool_flags import BenchConfig
    from onpolicy.rollout.engine_args import engine_environment, engine_flags
    from onpolicy.run.launch.engine_specs import rollout_spec

    tokens = max(batch * (context + MARGIN) for batch, context in cells)
    batch, context = (max(sizes) for sizes in zip(*cells, strict=True))
    argv = ["decode", "--hf-checkpoint", model, "--dtype", "bfloat16"]
    argv += ["--batch-sizes", "1", "--context-lens", str(context), "--max-new-tokens", "8"]
    argv += ["--sglang-max-total-tokens", str(tokens)]
    known = kind in ("stock", DETERMINISTIC)
    argv += [] if known else ["--operators", kind]
    hf_config = AutoConfig.from_pretrained(model)
    config = fit_decode(parse(BenchConfig, argv, "onpolicy bench"), hf_config)
    train_config, contract = setting(config, hf_config, kind if known else "aligned")
    spec = rollout_spec(train_config, hf_config, contract, context + config.max_new_tokens)
    flags = [*engine_flags(spec, 30000), "--load-format", "dummy"]
    flags[flags.index("--max-running-requests") + 1] = str(batch)
    flags += ["--cuda-graph-bs-decode", *(str(size) for size in sorted({b for b, _ in cells}))]
    return flags, engine_environment(spec)


class Decoding:
    """A replacement of one_batch's measurement: every cell once, and written at once."""

    def __init__(self, cells: Sequence[Cell], lock: IO[str], write: Callable[..., None]):
        self.cells, self.lock, self.write = cells, lock, write
        self.is_alone: bool | None = None

    def __call__(
        self, name: str, runner: Any, say: object, requests: list[Any], batch: int, context: int,
        *others: object, **more: object,
    ) -> None:  # fmt: skip
        if self.is_alone is None:  # one_batch's warm-up; ours is part of every cell
            self.is_alone = _wait_for_others(self.lock)
            return
        if (batch, context) in self.cells:
            cell = {"batch_size": batch, "context_len": context, "is_alone": self.is_alone}
            try:
                self._measure(runner, requests, cell)
            except Exception as error:  # the other cells may fit
                self.write(cell | {"error": f"{type(error).__name__}: {error}"[:300]})

    def _measure(self, runner: Any, requests: list[Any], cell: dict[str, Any]) -> None:
        seen = _watch_forward(runner.torch_runner)
        runner.clear()
        tokens, batch = _prefilled(runner, requests, cell["context_len"])
        seconds = []
        for _ in range(WARM_STEPS + STEPS):
            runner.synchronize()
            started = time.perf_counter()
            tokens, _ = runner.decode(tokens, batch)
            runner.synchronize()
            seconds.append(time.perf_counter() - started)
        forward = partial(seen["forward"], seen["batch"])
        cell["step_ms"] = 1e3 * median(seconds[WARM_STEPS:])
        cell["is_captured"] = seen["is_captured"]
        cell["forward_ms"] = _queued(forward, runner.synchronize)
        self.write(cell)
        if cell["batch_size"] == max(batch for batch, _ in self.cells):
            where = {name: cell[name] for name in ("batch_size", "context_len")}
            self.write(where | {"profile_us": _profile(forward, runner.synchronize)})


def _wait_for_others(lock: IO[str]) -> bool:
    """Exchange the shared lock of an engine that loads for the one that measures; return whether
    that was possible in time."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.1)
    return False


def _watch_forward(runner: Any) -> dict[str, Any]:
    """Return what the runner's last forward pass was given, and whether it was captured."""
    original = getattr(runner.forward, "original", runner.forward)
    seen: dict[str, Any] = {"forward": original}

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(batch, *args, **kwargs)
        seen.update(batch=batch, is_captured=bool(output.can_run_graph))
        return output

    forward.original = original  # type: ignore[attr-defined]
    runner.forward = forward
    return seen


def _prefilled(runner: Any, requests: list[Any], context: int) -> tuple[Any, Any]:
    """Prefill a few sequences at a time; return the first token of each, and all as one batch.

    They are sampled as a rollout's are: at temperature 1, with log-probabilities.
    """
    import torch

    for request in requests:
        request.sampling_params.temperature, request.sampling_params.top_k = 1.0, 1 << 30
    most = PREFILL if torch.cuda.is_available() else SMALL_PREFILL
    size = max(1, most // context)
    groups = [requests[start : start + size] for start in range(0, len(requests), size)]
    parts = [runner.extend(group) for group in groups]
    batch = parts[0][2]
    for _, _, part in parts[1:]:
        batch.merge_batch(part)
    batch.return_logprob = True
    batch.top_logprobs_nums = [0] * len(requests)
    batch.token_ids_logprobs = [None] * len(requests)
    return torch.cat([tokens for tokens, _, _ in parts]), batch


def _queued(forward: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Return milliseconds of a forward pass among several that are queued at once."""
    import torch

    with torch.no_grad():
        forward()
        synchronize()
        started = time.perf_counter()
        for _ in range(STEPS):
            forward()
        synchronize()
    return 1e3 * (time.perf_counter() - started) / STEPS


def _profile(forward: Callable[[], object], synchronize: Callable[[], None]) -> dict[str, float]:
    """Return the kernels that take most of a forward pass, in microseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.no_grad(), profile(activities=[activity]) as p:
        forward()
        synchronize()
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = sorted(p.key_averages(), key=lambda each: -getattr(each, time_of))[:KERNELS]
    return {each.key[:120]: round(getattr(each, time_of), 1) for each in kernels}


def measure(kind: str, model: str, cells: Sequence[Cell], lock: IO[str], output: int) -> None:
    """Measure one engine in this process, which SGLang fills with its global state."""
    flags, variables = engine(kind, model, cells)
    os.environ.update(variables)
    from sglang_patches.server_process import RENDEZVOUS_VARIABLE, import_lightly

    # Engines that start side by side might choose one port; each meets itself in a file.
    os.environ[RENDEZVOUS_VARIABLE] = f"file://{os.path.abspath(lock.name)}-{os.getpid()}"
    import_lightly()
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_patches import registry

    load_plugins()
    registry.require_active()
    layers = json.loads((Path(model) / "config.json").read_text())["num_hidden_layers"]
    about = {"kind": kind, "layers": layers}
    one_batch.get_tokenizer = lambda *args, **more: None
    one_batch.latency_test_run_once = Decoding(
        cells, lock, lambda line: write_line(output, about | line)
    )
    sizes = [tuple(sorted({*values})) for values in zip(*cells, strict=True)]
    bench = one_batch.BenchArgs(
        batch_size=sizes[0], input_len=sizes[1], output_len=(8,), result_filename=""
    )
    one_batch.main(prepare_server_args(flags), bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if an engine failed."""
    prepare_process()
    output = claim_output()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", required=True, help="engines; commas between")
    parser.add_argument("--cells", required=True, help="sequences x context; commas between")
    parser.add_argument("--models", nargs="+", required=True, help="folders with a config.json")
    parser.add_argument(
        "--lock", type=Path, required=True, help="a file that engines take turns by"
    )
    args = parser.parse_args(argv)
    if len(args.models) == 1 and "," not in args.kinds:
        with open(args.lock, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            measure(args.kinds, args.models[0], cells_of(args.cells), lock, output)
        return 0
    pairs = [(kind, Path(model)) for kind in args.kinds.split(",") for model in args.models]
    return run_side_by_side(pairs, args.cells, args.lock, output)


def run_side_by_side(
    engines: Sequence[tuple[str, Path]], cells: str, lock: Path, output: int
) -> int:
    """Run engines, each in its own process with a log beside `lock`; say of one that fails why, and
    return 1 if any did."""
    command = [sys.executable, "-m", "benchmarks.gpu_quarter.decode_steps", "--cells", cells]
    command += ["--lock", str(lock), "--kinds"]
    running, has_failed = {}, False
    for kind, model in engines:
        with open(lock.with_name(f"decode-{kind}-{model.name}.log"), "w") as log:
            own = [*command, kind, "--models", str(model)]
            running[kind, model.name, log.name] = subprocess.Popen(own, stdout=output, stderr=log)
    while running:
        ended = {names: process.poll() for names, process in running.items()}
        for names in [names for names, code in ended.items() if code is not None]:
            del running[names]
            if ended[names]:
                has_failed, (kind, model, log) = True, names
                said = Path(log).read_text(errors="replace")[-LAST_CHARACTERS:]
                line = {"kind": kind, "model": model, "exit_code": ended[names], "error": said}
                write_line(output, line)
        time.sleep(0.1)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
