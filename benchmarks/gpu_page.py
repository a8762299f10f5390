"""Rendering of a `benchmarks.gpu_bench` record as a page and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from benchmarks.gpu_ops import report

Record = Mapping[str, Any]

PHASES = ("prefill", "decode")


def page(result: Record) -> str:
    """Return Markdown with the measurements, part by part."""
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    blocks = ["# Aligned engines beside stock ones", f"{machine}. Model: {result['model']}."]
    for name, part in result.get("parts", {}).items():
        blocks.append(f"## {name}")
        if part.keys() - {"error"}:
            blocks += TABLES[name](part)
        if "error" in part:
            blocks.append("Failed:\n\n" + indent(part["error"].strip(), "    "))
    return "\n\n".join(blocks) + "\n"


def _decode(part: Record) -> Iterator[str]:
    yield "Tokens per second of whole servers; `ratio` is aligned over the other."
    yield table(
        ["context", "batch", "phase", "kind", "tokens/s", "ratio"],
        [
            [cell["context_len"], cell["batch_size"], phase, kind, f"{speed:,.0f}", ratio]
            for cell in part["cells"]
            for phase in PHASES
            for kind, speed, ratio in _kinds(cell[phase])
        ],
    )
    for cell in part["not_measured"]:
        yield f"Not measured: {cell['batch_size']} x {cell['context_len']}; {cell['why']}."


def _kinds(measured: Record) -> Iterator[tuple[str, float, str]]:
    ratios = {"stock": measured["ratio"], **measured.get("ratio_to", {})}
    for kind in ("aligned", *ratios):
        ratio = f"{ratios[kind]:.2f}" if kind in ratios else ""
        yield kind, measured[kind]["tokens_per_second"], ratio


def _step(part: Record) -> Iterator[str]:
    yield "Seconds of an optimizer step; `ratio` is aligned throughput over stock."
    yield table(
        ["tokens", "aligned", "stock", "ratio"],
        [
            [
                step["num_tokens"],
                *(f"{step[kind]['seconds']:.3f}" for kind in ("aligned", "stock")),
                f"{step['ratio']:.2f}",
            ]
            for step in part["by_num_tokens"]
        ],
    )


def _operators(part: Record) -> Iterator[str]:
    yield report.summary(part)


def _push(part: Record) -> Iterator[str]:
    yield "Pushes of all weights to one server."
    yield table(
        ["way", "MiB of a bucket", "tensors", "GB", "seconds", "GB/s"],
        [
            [
                cell["way"],
                cell["bucket_mib"],
                cell["tensors"],
                f"{cell['bytes'] / 1e9:.2f}",
                f"{cell['now']['seconds']:.3f}",
                f"{cell['bytes'] / cell['now']['seconds'] / 1e9:.2f}",
            ]
            for cell in part["pushes"]
        ],
    )
    metadata = part["metadata"]
    yield (
        f"Names, shapes and places of {metadata['tensors']} tensors ({metadata['model']}): "
        f"{metadata['cpu_seconds_in_all']:.2f} s of CPU."
    )


TABLES = {"operators": _operators, "decode": _decode, "step": _step, "push": _push}


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def draw(result: Record, image: Path) -> None:
    """Draw a PNG of the aligned servers' speedup, by batch and context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = result.get("parts", {}).get("decode", {}).get("cells", [])
    figure, axes = pyplot.subplots(1, len(PHASES), figsize=(9, 3.2), sharey=True)
    for axis, phase in zip(axes, PHASES, strict=True):
        names = [f"{cell['batch_size']} x {cell['context_len']}" for cell in cells]
        for kind in ("stock", "deterministic"):
            ratios = [_ratio(cell[phase], kind) for cell in cells]
            if any(ratios):
                axis.plot(names, ratios, "o-", label=f"aligned over {kind}")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title(phase)
        axis.set_xlabel("batch x context")
        axis.tick_params(axis="x", rotation=60)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


def _ratio(measured: Record, kind: str) -> float | None:
    ratios = {"stock": measured["ratio"], **measured.get("ratio_to", {})}
    return ratios.get(kind)
