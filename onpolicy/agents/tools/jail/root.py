"""A root directory with Python's libraries alone to read, and a small one in memory to write to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from onpolicy.agents.tools.jail import linux

WORK = "/work"
"""Where the program begins, and the one place where it may write."""

_DEVICES = ("/dev/null", "/dev/urandom")
_NOBODY = 65534


@contextmanager
def map_users(user: int) -> Iterator[None]:
    """Give the user namespace that the code inside begins one user, who is this process's outside.

    Of root's, the program's user is nobody outside: Linux limits no processes of root. Only a process
    that stays outside can say so. Raises OSError.
    """
    if os.getuid() != 0:
        outside = os.getuid(), os.getgid()
        yield
        _map(os.getpid(), [(user, outside[0])], [(user, outside[1])], deny_groups=True)
        return
    process, (begun, begin) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(begin)
        both = [(0, 0), (user, _NOBODY)]
        code = 0
        try:
            if os.read(begun, 1):
                _map(process, both, both, deny_groups=False)
        except OSError as error:
            code = error.errno or 1
        os._exit(code)
    try:
        yield
        os.write(begin, b"x")
    finally:
        for descriptor in (begun, begin):
            os.close(descriptor)
        _, how = os.waitpid(helper, 0)
    if code := os.waitstatus_to_exitcode(how):
        raise OSError(code, f"mapping users: {os.strerror(code)}")


def _map(
    process: int, users: list[tuple[int, int]], groups: list[tuple[int, int]], *, deny_groups: bool
) -> None:
    if deny_groups:  # before a group may be mapped without privileges
        _write(f"/proc/{process}/setgroups", "deny")
    for kind, pairs in (("uid", users), ("gid", groups)):
        lines = "".join(f"{inside} {outside} 1\n" for inside, outside in pairs)
        _write(f"/proc/{process}/{kind}_map", lines)


def _write(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def build_root(
    directory: str, readable: Sequence[str], size: int, num_files: int, user: int
) -> None:
    """Make `directory` the root: in it what is `readable`, and WORK with so many bytes and files.

    `size`: bytes of all files together, which lie in memory. Raises OSError.
    """
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("none", directory, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for path in readable:
        _show(path, directory)
    os.makedirs(f"{directory}/dev")
    for device in _DEVICES:
        open(f"{directory}{device}", "x").close()
        linux.mount(device, f"{directory}{device}", "", linux.MS_BIND)
    work = f"{directory}{WORK}"
    os.mkdir(work)
    # One file more: the directory itself.
    settings = f"size={size},nr_inodes={num_files + 1},mode=700,uid={user},gid={user}"
    linux.mount("none", work, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, settings)
    linux.restrict_mount(directory, linux.MOUNT_ATTR_RDONLY, recursively=False)
    linux.change_root(directory)
    os.chdir(WORK)


def _show(path: str, directory: str) -> None:
    """A link as it is; a directory so that nothing in it can be written."""
    target = f"{directory}{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
        linux.mount(path, target, "", linux.MS_BIND | linux.MS_REC)
        attributes = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
        linux.restrict_mount(target, attributes, recursively=True)
