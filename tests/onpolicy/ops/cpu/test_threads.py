"""Which thread runs a product's pieces, and which threads are waited for."""

import threading

import pytest
import torch

from onpolicy.ops.cpu.gemms import Gemms
from onpolicy.ops.cpu.linear import tiled_linear
from onpolicy.ops.cpu.threads import MIN_PARALLEL_FLOPS, PiecePool


def test_a_helper_that_has_not_begun_is_not_waited_for():
    pool, may_end, ran = PiecePool(2), threading.Event(), []
    busy = pool._executor.submit(may_end.wait)
    work = threading.Thread(
        target=pool.run, args=([lambda: ran.append(threading.get_ident())] * 4, MIN_PARALLEL_FLOPS)
    )
    work.start()
    work.join(timeout=60)
    is_waiting = work.is_alive()
    may_end.set()
    work.join()
    assert busy.result() and not is_waiting
    assert len(ran) == 4 and len({*ran}) == 1


def test_the_failure_of_a_helper_is_not_lost():
    pool, together = PiecePool(2), threading.Barrier(2, timeout=60)

    def piece():
        together.wait()
        if threading.current_thread().name.startswith("onpolicy-ops"):
            raise OSError("the helper's")

    with pytest.raises(OSError, match="the helper's"):
        pool.run([piece, piece], MIN_PARALLEL_FLOPS)


@pytest.mark.parametrize(("rows", "hands_over"), [(300, 0), (8192, 1)])
def test_a_small_product_hands_nothing_over_and_has_the_bits_of_one_thread(rows, hands_over):
    pool, handed = PiecePool(2), []
    submit = pool._executor.submit
    pool._executor.submit = lambda *args: handed.append(args) or submit(*args)
    x, weight = torch.randn(rows, 192), torch.randn(512, 192)
    shared = tiled_linear(Gemms(pool), x, weight, None)
    assert len(handed) == hands_over
    assert torch.equal(shared, tiled_linear(Gemms(PiecePool(1)), x, weight, None))
