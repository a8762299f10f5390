"""Commands whose programs this process starts, and so may fork (forked_processes.py).

They are for what does not know of that: a script that finds `onpolicy` in its PATH, or Ray, which is
told of a Python for its workers. A command asks, waits, and ends with the same exit code.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

from tests.support.fork_server import MAX_REQUEST

COMMAND = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = [[*{program!r}, *sys.argv[1:]], dict(os.environ), os.getcwd()]
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
sys.exit(int(server.recv(32)))
"""


@contextlib.contextmanager
def forked_commands(directory):
    """`onpolicy` in `directory`."""
    with offer(directory / "onpolicy", ["-m", "onpolicy.cli"]) as listener:
        yield
        listener.shutdown(socket.SHUT_RDWR)


def offer(command, program, prepare=lambda program, environment: (program, environment)):
    """Write a command that runs a program with more arguments, and answer it as long as we live, or
    until the socket that is returned is shut down. `command` is a short path: a socket lies beside it.
    `prepare` may change the program and the environment that it was asked to run in.
    """
    address = f"{command}.s"
    command.write_text(COMMAND.format(python=sys.executable, address=address, program=program))
    command.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    threading.Thread(target=_answer, args=(listener, prepare), daemon=True).start()
    return listener


def _answer(listener, prepare):
    with contextlib.suppress(OSError):  # shut down
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_run, args=(connection, prepare), daemon=True).start()


def _run(connection, prepare):
    message, streams, *_ = socket.recv_fds(connection, MAX_REQUEST, 3)
    program, environment, directory = json.loads(message)
    program, environment = prepare(program, environment)
    stdin, stdout, stderr = streams
    process = subprocess.Popen(
        [sys.executable, *program],
        env=environment, cwd=directory, stdin=stdin, stdout=stdout, stderr=stderr,
    )  # fmt: skip
    for stream in streams:
        os.close(stream)
    with connection:
        connection.send(b"%d" % (process.wait() % 256))
