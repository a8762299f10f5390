"""Operators on numbers as trained weights have them, and random weights do not.

SmolLM2-135M and Gemma-3-270M on a page of English have residuals of 22,272 and 103,936 beside a median
of 6, the first key with up to all of a head's attention, equal first logits in 3 and 4 % of bfloat16
rows, and, at temperature 0.3, log-probabilities of -1e-7 and of 0.
"""

import pytest
import torch

from onpolicy.ops import AttentionLayout, ScoreRule
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.draws import draw

OPERATORS = CpuOperators(1)
ROWS, HIDDEN = 37, 576
PARTS = ([0], [36], [5, 4, 3], range(20, 37))

of_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def residual(dtype):
    """A first row with one channel far above all others, as the first token of a sequence has it."""
    x = 6 * normal(ROWS, HIDDEN)
    x[0, 507] = 103_936.0
    x[5, 507] = -22_272.0
    return x.to(dtype)


def require_rows_alone(function, *inputs):
    """Every part of the rows has the bits that it has among all, and all are finite."""
    whole = function(*inputs)
    assert whole.isfinite().all()
    for part in map(torch.tensor, map(list, PARTS)):
        assert torch.equal(function(*(x[part] for x in inputs)), whole[part])
    return whole


@of_dtypes
def test_outliers_leave_a_row_of_a_linear_its_bits(dtype):
    weight = normal(200, HIDDEN, seed=1).to(dtype)
    require_rows_alone(lambda x: OPERATORS.linear(x, weight), residual(dtype))


@of_dtypes
def test_outliers_leave_a_row_of_a_norm_its_bits(dtype):
    weight = normal(HIDDEN, seed=2).to(dtype)
    found = require_rows_alone(lambda x: OPERATORS.rms_norm(x, weight, 1e-6), residual(dtype))
    assert found[0].abs().max() > 20 * found[0].abs().median()


@of_dtypes
@pytest.mark.parametrize("pull", [20.0, 200.0])
def test_a_first_key_that_takes_nearly_all_attention_takes_it_in_every_batch_shape(dtype, pull):
    """Decode steps and later chunks beside the whole, where other keys weigh 1e-8 or nothing."""
    length, heads, dim = 150, 3, 64
    q, k, v = (normal(length, heads, dim, seed=i) for i in range(3))
    q[:, :, 0], k[:, :, 0] = pull**0.5, 0.0
    k[0, :, 0] = 8 * pull**0.5
    q, k, v = (x.to(dtype) for x in (q, k, v))
    rule = ScoreRule(dim**-0.5)
    whole = OPERATORS.attention(q, k, v, AttentionLayout.packed((length,)), rule)
    torch.testing.assert_close(whole[-1], v[0], rtol=0.1, atol=0.1)
    for count in (1, 7, 100):
        rows = torch.arange(length)[None]
        layout = AttentionLayout(query_lens=(count,), key_lens=(length,), key_rows=rows)
        assert torch.equal(OPERATORS.attention(q[-count:], k, v, layout, rule), whole[-count:])


def sure_logits(dtype):
    """Rows whose first logit leads by 0 (a tie) to 40, where its log-probability has become 0."""
    logits = normal(ROWS, 49_152, seed=3).clamp(-4, 4) - 30
    lead = torch.linspace(0, 40, ROWS)
    logits[:, 11], logits[:, 40_000] = lead, 0.0
    return logits.to(dtype)


@of_dtypes
def test_log_probabilities_down_to_nothing_have_their_bits_alone_and_in_one_function_or_two(dtype):
    logits, temperature = sure_logits(dtype), torch.full((ROWS, 1), 0.7)
    targets = torch.full((ROWS,), 11)
    gathered = require_rows_alone(
        lambda *x: OPERATORS.gather_log_probs(*x)[0], logits, temperature, targets
    )
    every = OPERATORS.log_softmax(logits, temperature)
    assert torch.equal(gathered, every[:, 11])
    assert gathered.max() == 0
    assert ((gathered < 0) & (gathered > -3e-7)).any()
    assert torch.equal(every[0, 11], every[0, 40_000])


def test_a_tie_is_drawn_by_the_number_alone_and_a_sure_token_always():
    every = OPERATORS.log_softmax(sure_logits(torch.bfloat16), torch.full((ROWS, 1), 0.3))
    for number in (2**-24, 0.2, 0.49, 0.51, 0.8, 1 - 2**-24):
        numbers = torch.full((ROWS,), number, dtype=torch.float64)
        drawn = require_rows_alone(lambda *x: draw(OPERATORS, *x), every, numbers)
        assert drawn[0] == (11 if number < 0.5 else 40_000)
        assert drawn[-1] == 11
