"""CUDA graphs are refused by name where a pass is laid out on the host."""

from types import SimpleNamespace

import pytest

from onpolicy.errors import ContractError
from sglang_patches.engine_graphs import require_no_graphs


def test_cuda_graphs_are_refused_by_name(monkeypatch):
    from sglang.srt.model_executor import cuda_graph_config

    what = "the layout of recurrent layers, which is"
    monkeypatch.setattr(cuda_graph_config, "cuda_graph_fully_disabled", lambda: False)
    require_no_graphs(SimpleNamespace(device="cpu"), what)
    with pytest.raises(
        ContractError, match=r"cuda graphs: .*recurrent layers.*--disable-cuda-graph"
    ):
        require_no_graphs(SimpleNamespace(device="cuda"), what)
    monkeypatch.setattr(cuda_graph_config, "cuda_graph_fully_disabled", lambda: True)
    require_no_graphs(SimpleNamespace(device="cuda"), what)
