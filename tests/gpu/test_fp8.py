"""Products of bytes by DeepGEMM: a row has the same bits in any call, and a graph reads what is held."""

import torch

from onpolicy.ops.hopper.gemm import BLOCK
from onpolicy.weights.rounding import round_weight
from tests.gpu import gemm_checks
from tests.gpu.gemm_checks import linears_of_bytes


def test_a_row_does_not_depend_on_the_number_of_rows(of_bytes, model, setting, numbers, tally):
    with torch.no_grad():
        for name, (n, k) in linears_of_bytes(model).items():
            counts, case = setting.few_row_counts, f"{name} {n}x{k}"
            gemm_checks.check_row_counts(of_bytes.linear, n, k, counts, numbers, tally, case)
            partial = of_bytes.partial_linear
            counts = setting.three_row_counts
            gemm_checks.check_row_counts(partial, n, k, counts, numbers, tally, f"partial {case}")


def test_a_shard_of_whole_blocks_has_the_bits_of_the_whole(
    of_bytes, model, setting, numbers, tally
):
    with torch.no_grad():
        for name, (n, k) in linears_of_bytes(model).items():
            weight = gemm_checks.make_weight(numbers, n, k)
            for rows in setting.three_row_counts:
                x = numbers(rows, k, seed=2)
                parts = [of_bytes.linear(x, part.clone()) for part in weight.split(BLOCK)[:3]]
                whole = of_bytes.linear(x, weight)[:, : 3 * BLOCK]
                tally.equal(torch.cat(parts, 1), whole, f"{name} {n}x{k}, {rows} rows")


def test_results_are_right(of_bytes, model, numbers, tally):
    """Check within the precision of tensor cores: some 14 bits of the sums of FP8 numbers in a
    block."""
    with torch.no_grad():
        for name, (n, k) in linears_of_bytes(model).items():
            x = round_weight(numbers(70, k, seed=1), "fp8_e4m3")
            weight = round_weight(gemm_checks.make_weight(numbers, n, k), "fp8_e4m3_block128")
            exact = x.double() @ weight.double().t()
            norms = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
            for got in (of_bytes.linear(x, weight), of_bytes.partial_linear(x, weight)):
                bound = torch.finfo(got.dtype).eps * exact.abs() + 2**-10 * norms
                tally.close(got, exact, bound, f"{name} {n}x{k} as {got.dtype}")


def test_a_cuda_graph_reads_the_bytes_that_were_held_last(of_bytes, setting, numbers, tally):
    n, k = 2 * BLOCK, 3 * BLOCK
    x, weight = numbers(5, k, seed=1), gemm_checks.make_weight(numbers, n, k)
    pushed = [weight.clone(), weight.flip(0)]
    with torch.no_grad():
        want = [of_bytes.linear(x, each) for each in pushed]
        of_bytes.hold([weight])
        step = _captured(lambda: of_bytes.linear(x, weight), setting.device)
        for number, values in enumerate(pushed):
            weight.copy_(values)
            of_bytes.hold([weight])
            tally.equal(step(), want[number], f"push {number}")


def _captured(function, device):
    """Return the function as a CUDA graph; unchanged in a rehearsal."""
    if device != "cuda":
        return function
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()

    def replay():
        graph.replay()
        return out

    return replay
