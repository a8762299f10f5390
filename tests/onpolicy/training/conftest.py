"""The training engines that a test is run with, and groups of ranks, started once for a file."""

import pytest


@pytest.fixture(params=["fsdp", "megatron"])
def backend(request):
    if request.param == "megatron":
        pytest.importorskip("megatron.core")
    return request.param


def _ranks(count):
    from tests.support.megatron_ranks import (
        Ranks,
    )  # takes seconds, which most tests here do not need

    ranks = Ranks(count)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def one_rank():
    yield from _ranks(1)


@pytest.fixture(scope="module")
def two_ranks():
    yield from _ranks(2)


@pytest.fixture(scope="module")
def four_ranks():
    yield from _ranks(4)
