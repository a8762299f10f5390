"""Engine and trainer run under one instruction set, whatever chose it.

`make test-cpus` runs this under each of its settings.
"""

import os

import psutil
import pytest

from onpolicy.contract import CONTRACT_VARIABLE
from tests.support.engines_fixture import make_engines, running
from tests.support.processes import variables

pytestmark = [pytest.mark.engine, pytest.mark.runs]

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA",
    "LD_PRELOAD",
)  # fmt: skip


def chosen(environment):
    return {name: environment[name] for name in VARIABLES if name in environment}


def test_every_process_of_an_engine_inherits_what_chose_the_trainers_kernels(checkpoint, tmp_path):
    """The engine is started anew, since a forked process shows the environment of another."""
    with running(make_engines(checkpoint, tmp_path), anew=True) as engines:
        children = map(variables, psutil.Process().children(recursive=True))
        of_engines = [environment for environment in children if CONTRACT_VARIABLE in environment]
        assert len(of_engines) > 1  # the server and its scheduler at least
        for environment in of_engines:
            assert chosen(environment) == chosen(os.environ)
        assert "MKL_CBWR" in os.environ
        assert engines.rollout.clients[0].report()["self_check"] == engines.trainer.self_check
