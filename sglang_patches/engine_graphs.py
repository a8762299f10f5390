"""Refusal of CUDA graphs for passes whose inputs are made on the host."""

from __future__ import annotations

from typing import Any

from onpolicy.errors import ContractError


def require_no_graphs(runner: Any, what: str) -> None:
    """Raise ContractError if SGLang is to record this model's passes, since none can hold `what`."""
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    if runner.device != "cpu" and not cuda_graph_fully_disabled():
        raise ContractError(
            f"cuda graphs: none can hold {what} made on the host for every pass. Start the engine with "
            "--disable-cuda-graph."
        )
