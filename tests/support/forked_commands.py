"""`onpolicy` for scripts that tests run: its processes are forked.

A script finds it in its PATH. It asks the test's process, waits, and ends with the same exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

from tests.support.fork_server import MAX_REQUEST
from tests.support.forked_processes import forked_processes

COMMAND = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = [["-m", "onpolicy.cli", *sys.argv[1:]], dict(os.environ), os.getcwd()]
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
sys.exit(int(server.recv(32)))
"""


@contextlib.contextmanager
def forked_commands(directory):
    """Writes it into `directory`, and answers it. A short path: it holds a socket."""
    address, command = str(directory / "s"), directory / "onpolicy"
    command.write_text(COMMAND.format(python=sys.executable, address=address))
    command.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, forked_processes():
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def _answer(listener):
    with contextlib.suppress(OSError):  # shut down
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection):
    message, streams, *_ = socket.recv_fds(connection, MAX_REQUEST, 3)
    program, environment, directory = json.loads(message)
    stdin, stdout, stderr = streams
    process = subprocess.Popen(
        [sys.executable, *program],
        env=environment, cwd=directory, stdin=stdin, stdout=stdout, stderr=stderr,
    )  # fmt: skip
    for stream in streams:
        os.close(stream)
    with connection:
        connection.send(b"%d" % (process.wait() % 256))
