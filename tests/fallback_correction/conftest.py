"""Fixtures of the fallback corrections' tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Torch starts threads even for a handful of numbers, which takes milliseconds on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
