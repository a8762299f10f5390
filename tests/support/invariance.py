"""What row invariance means, as a check for all operators."""

import torch
from hypothesis import strategies as st


def require_row_invariance(of_rows, rows, data):
    """`of_rows(int64 [R])`, the results for some rows, gives each the bits it has among all."""
    cut = data.draw(st.integers(1, rows - 1))
    order = data.draw(st.permutations(range(rows)))
    require_same_bits(of_rows, rows, [range(cut), range(cut, rows), order])


def require_same_bits(of_rows, rows, parts):
    whole = of_rows(torch.arange(rows))
    for part in map(torch.tensor, parts):
        assert torch.equal(of_rows(part), whole[part]), f"{len(part)} of {rows} rows"
