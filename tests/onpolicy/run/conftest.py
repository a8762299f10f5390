"""What whole runs on in-memory engines need."""

import pytest

from onpolicy.training import distributed


@pytest.fixture(scope="module")
def one_process():
    """Whole runs in this process."""
    distributed.init_process_group()
