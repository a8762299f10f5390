"""The training engines that a test is run with."""

import pytest


@pytest.fixture(params=["fsdp", "megatron"])
def backend(request):
    if request.param == "megatron":
        pytest.importorskip("megatron.core")
    return request.param
