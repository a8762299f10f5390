"""System calls of Linux that Python's standard library has no function for."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_LAST_CAPABILITY = 63

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP, CLONE_THREAD = 0x2000000, 0x10000
ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)

MS_REMOUNT, MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE = 32, 1, 4096, 16384, 1 << 18
MS_NOSUID, MS_NODEV, MNT_DETACH = 2, 4, 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SYS_PIVOT_ROOT, _SYS_MOUNT_SETATTR = 155, 442  # x86-64


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, *arguments: int) -> None:
    """Raises OSError."""
    padded = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def unshare(flags: int) -> None:
    """Begin namespaces of this process's own. Raises OSError."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Raises OSError."""
    arguments = [each.encode() for each in (source, target, kind)]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {target}")


def restrict_mount(target: str, attributes: int, *, recursively: bool) -> None:
    """Forbid what `attributes` say in a mount, and in those below it. Raises OSError."""
    settings = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursively else 0
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR), _AT_FDCWD, target.encode(), flags, settings,
        ctypes.c_size_t(len(settings)),
    )  # fmt: skip
    _check(result, f"mount_setattr {target}")


def change_root(directory: str) -> None:
    """Make a mount point the root, and leave nothing of the old one. Raises OSError."""
    os.chdir(directory)
    _check(_libc.syscall(ctypes.c_long(_SYS_PIVOT_ROOT), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def give_up_privileges() -> None:
    """No program that this process becomes has a capability, whoever runs it and owns its file."""
    for capability in range(_LAST_CAPABILITY + 1):
        result = _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
        if result != 0 and ctypes.get_errno() not in (1, 22):  # not ours, or Linux has none so high
            _check(result, "dropping capabilities")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def install_filter(instructions: Sequence[tuple[int, int, int, int]]) -> None:
    """Have Linux judge each system call from now on by a BPF program. Raises OSError."""
    code = b"".join(struct.pack("=HBBI", *each) for each in instructions)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(program)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(pointer))
