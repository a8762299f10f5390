"""Positions of three axes are transformers' own, for any images in any part of a sequence."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from onpolicy.models.vision.image_positions import axis_positions

GRIDS = st.lists(
    st.tuples(st.integers(1, 5), st.tuples(st.integers(1, 4), st.integers(1, 4))), max_size=4
)


class Like:
    """What transformers' function reads of a model."""

    class config:
        class vision_config:
            spatial_merge_size = 2

    get_vision_position_ids = Qwen3VLModel.get_vision_position_ids


def published(length, images):
    kinds = torch.zeros(1, length, dtype=torch.int64)
    for start, (_, height, width) in images:
        kinds[0, start : start + height * width] = 1
    grids = torch.tensor([(1, 2 * height, 2 * width) for _, (_, height, width) in images])
    given_grids = grids if images else None
    found, _ = Qwen3VLModel.get_rope_index(Like(), torch.zeros_like(kinds), kinds, given_grids)
    return found[:, 0]


@given(GRIDS, st.integers(1, 6), st.data())
def test_they_are_the_published_ones_of_any_part(grids, tail, data):
    images, length = [], 0
    for gap, (height, width) in grids:
        images.append((length + gap, (1, height, width)))
        length += gap + height * width
    length += tail
    expected = published(length, images)
    assert torch.equal(axis_positions(0, length, images), expected)
    first = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(1, length - first))
    assert torch.equal(axis_positions(first, count, images), expected[:, first : first + count])


def test_another_grid_has_other_positions():
    one, other = (axis_positions(0, 9, [(1, grid)]) for grid in ((1, 2, 3), (1, 3, 2)))
    assert not torch.equal(one, other)
