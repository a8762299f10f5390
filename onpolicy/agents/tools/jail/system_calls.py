"""Which system calls a tool's program may not make, as a BPF program (linux/seccomp.h), for x86-64."""

from __future__ import annotations

import errno
import os

from onpolicy.agents.tools.jail import linux

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_X86_64, _X32 = 0xC000003E, 0x40000000
_CLONE, _CLONE3, _PRCTL, _TGKILL = 56, 435, 157, 234

NEVER = {
    "socket": 41, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "memfd_create": 319,
    "memfd_secret": 447, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    "pidfd_open": 434, "pidfd_getfd": 438, "kcmp": 312, "unshare": 272, "setns": 308, "mount": 165,
    "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsmount": 432, "mount_setattr": 442, "open_by_handle_at": 304, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "add_key": 248,
    "request_key": 249, "keyctl": 250, "acct": 163, "swapon": 167, "reboot": 169,
    "init_module": 175, "finit_module": 313, "kexec_load": 246, "quotactl": 179,
}  # fmt: skip
"""Network, memory that no limit of ours counts, that of others, namespaces, what is the kernel's."""

NOT_BESIDE_OTHERS = {
    "fork": 57, "vfork": 58, "kill": 62, "tkill": 200, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "setpgid": 109, "setsid": 112,
    "prlimit64": 302, "setpriority": 141, "sched_setaffinity": 203, "sched_setscheduler": 144,
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94,
    "fchownat": 260,
}  # fmt: skip
"""Where other processes can be seen: new processes, signals to others, and what changes others."""

Instruction = tuple[int, int, int, int]


def make_filter(*, beside_others: bool) -> list[Instruction]:
    """The program. `beside_others`: the calling process has no PID namespace of its own."""
    denied = {**NEVER, **(NOT_BESIDE_OTHERS if beside_others else {})}
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        *_refuse(_CLONE3, errno.ENOSYS),  # its flags lie in memory; libc falls back to clone
    ]
    for number in denied.values():
        program += _refuse(number, errno.EPERM)
    if beside_others:
        program += _only_if(_CLONE, _ANY_BIT, linux.CLONE_THREAD)
        program += _only_if(_TGKILL, _EQUAL, os.getpid())
        program += _unless(_PRCTL, _EQUAL, linux.PR_SET_PDEATHSIG)
    else:
        program += _unless(_CLONE, _ANY_BIT, linux.ALL_NAMESPACES | linux.CLONE_NEWCGROUP)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _refuse(number: int, error: int) -> list[Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]


def _only_if(number: int, test: int, value: int) -> list[Instruction]:
    """Allow a call if its first argument passes a test, and refuse it otherwise."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (test, 1, 0, value),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _unless(number: int, test: int, value: int) -> list[Instruction]:
    """Refuse a call if its first argument passes a test, and allow it otherwise."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (test, 0, 1, value),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
