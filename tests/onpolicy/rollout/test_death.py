"""What an engine died of is said in a sentence, with what to try."""

import re

import pytest

from onpolicy.rollout import server
from onpolicy.rollout.server import cause_of_death, oom_kills

SGLANG = (
    "    raise_if_dead()\n[2026-11-23 05:44:43] kill_process_tree called: parent_pid=9, pid=9\n"
)


def traceback(line):
    return (
        "[2026-11-23 05:44:38] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/sglang/srt/managers/scheduler.py", line 7, in run_scheduler_process\n'
        '  File "/x/sglang_patches/linear.py", line 39, in row_forward\n'
        f"{line}\n\n{SGLANG}"
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "ModuleNotFoundError: No module named 'einops'",
            "an import failed in row_forward of /x/sglang_patches/linear.py, line 39 "
            "(ModuleNotFoundError: No module named 'einops'). Install",
        ),
        (
            "AttributeError: 'Linear' object has no attribute 'tp_size'",
            "AttributeError: 'Linear' object has no attribute 'tp_size' in row_forward of "
            "/x/sglang_patches/linear.py, line 39. If",
        ),
        (
            "onpolicy.errors.ContractError: missing patches=['a.b']: SGLang could not apply them.",
            "missing patches=['a.b']: SGLang could not apply them.",
        ),
        ("MemoryError: Unable to allocate 9 GiB", "it ran out of memory (MemoryError: Unable"),
        (
            "RuntimeError: [enforce fail] . DefaultCPUAllocator: can't allocate memory",
            "it ran out of memory (DefaultCPUAllocator: can't allocate memory). Give --sglang-max-tot",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried",
            "it ran out of memory (OutOfMemory",
        ),
        (
            "OSError: [Errno 98] Address already in use",
            "its port was taken (OSError: [Errno 98] Address already in use). Give another --rollout-b",
        ),
    ],
)
def test_the_first_error_of_the_log_is_named_with_its_place_and_a_remedy(line, says):
    assert cause_of_death(137, traceback(line)).startswith(says)


def test_the_plug_ins_own_refusal_comes_before_what_follows_from_it():
    log = traceback("RuntimeError: later") + traceback(
        "onpolicy.errors.ContractError: a=1: no. Do b."
    )
    assert cause_of_death(1, log) == "a=1: no. Do b."


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            137,
            "it was ended by SIGKILL: a process of this host, not its guard and not the kernel's",
        ),
        (143, "it was ended by SIGTERM: a process of this host"),
        (-9, "its guard was ended by SIGKILL: a process of this host"),
        (139, "it was ended by SIGSEGV: it crashed"),
        (0, "it was asked to end (SIGTERM to its guard)"),
        (77, "it ended with exit code 77, and its log names no error."),
    ],
)
def test_a_signal_is_named_with_who_can_have_sent_it(code, says):
    assert cause_of_death(code, "loading\nRuntimeError of a warning\n").startswith(says)


def test_the_kernels_word_comes_first(monkeypatch, tmp_path):
    file = tmp_path / "vmstat"
    file.write_text("pgfault 12\noom_kill 3\nnr 1\n")
    monkeypatch.setattr(server, "VMSTAT", file)
    assert oom_kills() == 3
    assert re.match("the kernel ended 2 processes .*want of memory", cause_of_death(137, "", 2))
    file.unlink()
    assert oom_kills() == 0
