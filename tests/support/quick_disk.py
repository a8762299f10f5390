"""What importing this saves a process that writes many small files: to wait for the disk.

A process that is killed loses nothing of what it wrote, waited for or not; only a host that loses its
power does, and no test cuts that. A run that a test starts anew waits as a user's does.
"""

import os


def _no_wait(fd):
    os.fstat(fd)  # a descriptor that is closed is refused, as ever


os.fsync = _no_wait
