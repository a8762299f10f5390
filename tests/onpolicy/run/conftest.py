"""What whole runs on in-memory engines need."""

import pytest

from onpolicy.train import distributed


@pytest.fixture(scope="module")
def undrawn():
    """Whole runs in this process, without the plot, which would take most of their time."""
    distributed.init_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onpolicy.run.journal.plot_run", lambda metrics_file, image: None)
        yield
