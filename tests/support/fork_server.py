"""Forks the Python processes that tests start from one that has imported what they import.

PyTorch, transformers and SGLang take seconds of CPU time to import, most of what a tiny run costs, and
a run is several processes. A fork server is asked for a program (a module or a script, and its
arguments), and forks a process that becomes it: a child of the one that asked, with the environment,
directory, streams and session that were asked for.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time

import setproctitle

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
MAX_REQUEST = 1 << 17
"""Bytes."""

_one_at_a_time = threading.Lock()


class ForkServer:
    """The process that forks others for this one, seen from here."""

    def __init__(self, channel, process=None):
        self._channel, self._process = channel, process

    @classmethod
    def start(cls, modules, environment):
        """One that imports `modules` in an environment. It ends with us."""
        ours, theirs = _channel()
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        return cls(ours, process)

    def start_another(self, modules, environment):
        """A fork server that has imported what this one has, and `modules` in an environment."""
        ours, theirs = _channel()
        with theirs:
            self.fork([theirs.fileno()], modules=modules, environment=environment)
        return ForkServer(ours)

    def fork(self, streams, **request):
        """The process id of a new child of this process; see `_become` for the request, or `main`."""
        message = json.dumps(request).encode()
        assert len(message) < MAX_REQUEST
        with _adopting():
            socket.send_fds(self._channel, [message], streams)
            pid = self._channel.recv(32)
        assert pid, "the fork server has ended"
        return int(pid)


def _channel():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextlib.contextmanager
def _adopting():
    """Descendants whose parents end become children of this process."""
    prctl = ctypes.CDLL(None).prctl
    with _one_at_a_time:
        prctl(_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            prctl(_SET_CHILD_SUBREAPER, 0)


def main(channel, modules, environment, changed):
    """Import `modules`, of "module:function" call the function too, serve, and become what is asked for.

    `changed`: variables that other imports have set.
    """
    setproctitle.getproctitle()  # finds its place while the environment is where it was
    os.environ.update(environment)
    before = dict(os.environ)
    gc.disable()
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.freeze()  # so that looking for garbage copies no page of what is shared with children
    gc.enable()
    changed = changed | {k: v for k, v in os.environ.items() if before.get(k) != v}
    added = [sys.path[0], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    _serve_and_become(channel, changed, [entry for entry in sys.path if entry not in added])


def _serve_and_become(channel, changed, path):
    request, streams = _serve(channel)
    channel.close()
    if "modules" in request:
        main(socket.socket(fileno=streams[0]), **request, changed=changed)
    else:
        _become(streams, changed, path, **request)


def _serve(channel):
    """Fork a process for each request, and return (request, streams) in it; never returns here."""
    while True:
        message, streams, *_ = socket.recv_fds(channel, MAX_REQUEST, 3)
        if not message:  # who asked has ended
            os._exit(0)
        read, write = os.pipe()
        if not (between := os.fork()):
            between = os.getpid()
            if child := os.fork():
                os.write(write, b"%d" % child)
                os._exit(0)
            while os.getppid() == between:  # until then we are not yet the child of who asked
                time.sleep(0.0005)
            os.close(read)
            os.close(write)
            return json.loads(message), streams
        os.waitpid(between, 0)
        channel.send(os.read(read, 32))
        for fd in (read, write, *streams):
            os.close(fd)


def _become(
    streams, changed, path, *, program, environment, directory, has_own_session, starts_others
):
    """Run a program in this process, as a Python that was started for it would.

    `changed`: variables that imports set. `path`: the modules' path, less what the process adds.
    """
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)
    if has_own_session:
        os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update({**changed, **environment})
    _read_environment_again()
    if starts_others:
        _offer_forks(changed, path)
    _name_process(program)
    sys.orig_argv[:] = [sys.executable, *program]
    if is_module := program[0] == "-m":
        program = program[1:]
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    first = directory if is_module else os.path.dirname(program[0])
    sys.path[:] = [first, *filter(None, given), *path]
    sys.argv[:] = program
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):  # as Python does when it starts
        importlib.import_module("sitecustomize")
    os._exit(_finish(lambda: _run(program[0], is_module)))


def _run(name, is_module):
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def _finish(run):
    """Python's end of a program, less taking all modules apart. Returns the exit code."""
    code = 0
    try:
        run()
    except SystemExit as stopped:
        code = stopped.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code & 0xFF


def _read_environment_again():
    """What imported modules have read, or drawn, once."""
    import numpy
    import torch

    from onpolicy.outputs import console

    tempfile.tempdir = None
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    numpy.random.seed()
    console._BEGAN = time.monotonic()


def _offer_forks(changed, path):
    """Start a fork server for this process, while it has no threads and nothing of its own."""
    from tests.support import forked_processes

    ours, theirs = _channel()
    if os.fork():
        theirs.close()
        forked_processes.use(ForkServer(ours))
        return
    ours.close()
    with open(os.devnull, "r+b", 0) as null:
        for stream in range(3):
            os.dup2(null.fileno(), stream)
    _serve_and_become(theirs, changed, path)


def _name_process(program):
    setproctitle.setproctitle(" ".join([sys.executable, *program]))
    setproctitle.setthreadtitle("python")
    if (
        "RAY_RAYLET_PID" in os.environ
    ):  # it names its workers, but would not find where that is done
        import ray

        ray._raylet.setproctitle = setproctitle.setproctitle


if __name__ == "__main__":
    from tests.support import fork_server  # the module, not this script

    fork_server.main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:], {}, {})
