"""What transformers brings along into a process of ours, and what it must leave out."""

import subprocess
import sys

from onpolicy.compat.light_imports import OF_IMAGES, UNUSED

USED = "onpolicy.training.policy_trainer, onpolicy.training.fsdp.fsdp_model"
"""What a rank of the trainer imports."""


def test_a_process_has_none_of_it_and_can_import_all_of_it():
    unused = *UNUSED, *OF_IMAGES
    code = (
        "import importlib, sys; from onpolicy.compat.light_imports import import_transformers\n"
        f"unused = {unused}; import_transformers(); import {USED}\n"
        "print({*unused} & sys.modules.keys())\n"
        "for name in unused: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "set()\n"
