"""MKL is asked for sums that do not depend on the number of rows, if nobody asked it otherwise."""

import os
import subprocess
import sys

import pytest
import torch

PRODUCT = """
import onpolicy, torch
with torch.backends.mkl.verbose(1):
    torch.ones(64, 64) @ torch.ones(64, 64)
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch was built without MKL")
@pytest.mark.parametrize("asked", ["", "COMPATIBLE"])
def test_strict_sums_are_in_force_from_the_first_product_on(asked):
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment |= {"MKL_CBWR": asked} if asked else {}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, capture_output=True, text=True
    )
    assert f"CNR:{asked or 'AUTO,STRICT'} " in done.stdout, done.stdout + done.stderr
