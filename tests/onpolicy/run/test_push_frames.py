"""A push is a few calls from the loop to the bytes."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onpolicy
from onpolicy.weights.transports import shared_memory
from tests.support.run_in_memory import run_in_memory

ROOT = str(Path(onpolicy.__file__).parent)
MOST = 8


def own_frames():
    """The project's functions that are being called, from the outermost."""
    frame, found = sys._getframe(), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROOT):
            found.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


def test_a_push_by_shared_memory_is_eight_frames_from_the_step_to_the_bytes(tmp_path, monkeypatch):
    thread, seen = threading.local(), set()

    class Traced(ThreadPoolExecutor):
        """Threads that know who asked them."""

        def submit(self, call, *args):
            asked = own_frames()

            def run():
                thread.asked = asked
                return call(*args)

            return super().submit(run)

    def fill(buffer, bucket):
        frames = [*thread.asked, *own_frames()]
        if "loop.take_step" in frames:
            seen.add((*frames[frames.index("loop.take_step") :], "flat.fill"))
        return own_fill(buffer, bucket)

    own_fill = shared_memory.Buffer.fill
    monkeypatch.setattr("onpolicy.weights.push.ThreadPoolExecutor", Traced)
    monkeypatch.setattr(shared_memory.Buffer, "fill", fill)
    run_in_memory(tmp_path, weight_sync="tensor", num_rollout=2, eval_sets={})
    (frames,) = seen
    assert frames == (
        "loop.take_step", "run.push_weights", "engines.push_weights", "weight_outlet.push",
        "push.push_weights", "broadcast.send", "shared_memory.send", "flat.fill",
    )  # fmt: skip
    assert len(frames) <= MOST
