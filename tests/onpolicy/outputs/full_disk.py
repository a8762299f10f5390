"""Writes into a run directory where the system refuses files over some bytes. Run by test_outputs.py.

In a process of its own: the limit holds for everything that a process writes.
"""

import logging
import resource
import sys

from test_outputs import CONTRACT

from onpolicy.config import TrainConfig
from onpolicy.errors import OutputError
from onpolicy.outputs.directory import RunDirectory


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def show(call, *args):
    try:
        with directory.writing():
            call(*args)
    except OutputError as error:
        print(error)


directory = RunDirectory(sys.argv[1], resumes=False)
config = TrainConfig()
directory.write_records(config, CONTRACT)
(sink,) = directory.sinks(config, 0)
with directory.log_file():
    for step in range(2):
        sink.log(step, {"x": 1.0})
    limit(40)
    show(directory.write_records, config, CONTRACT)
    show(sink.log, 2, {"x": 1.0})
    show(directory.record_move, 2, "stock", "tis", "k3 over its limit")
    for _ in range(20):
        logging.warning("a line of the log")
sink.close()
