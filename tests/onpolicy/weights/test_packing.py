"""Numbers of a format and their codes."""

import pytest
import torch

from onpolicy.weights.packing import decode, encode, magnitudes
from onpolicy.weights.rounding import FORMATS


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_number_of_a_format_comes_back_from_its_code(weight_format):
    known = magnitudes(weight_format)
    numbers = torch.cat([known, -known])[None]
    found = decode(encode(numbers, weight_format), weight_format)
    assert torch.equal(found.view(torch.int32), numbers.view(torch.int32))
