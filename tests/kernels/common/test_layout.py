"""The layout rules of ``sdfastgn/kernels/common/layout.py``."""

import pytest
import torch

from sdfastgn.kernels.common.layout import dense, dense_is_channels_last, empty_dense_like, is_channels_last

TENSORS = {
    "channels_first": torch.zeros(2, 6, 4, 5),
    "channels_last": torch.zeros(2, 4, 5, 6).movedim(-1, 1),
    "gaps_channels_innermost": torch.zeros(2, 4, 5, 9)[..., :6].movedim(-1, 1),
    "gaps_channels_first": torch.zeros(2, 6, 4, 9)[..., :5],
    "one_channel_with_gaps": torch.zeros(2, 1, 4, 9)[..., ::2],
    "one_position_with_gaps": torch.zeros(2, 12, 1, 1)[:, ::2],
    "flat": torch.zeros(4, 6),
    "flat_with_gaps": torch.zeros(4, 12)[:, ::2],
    "no_elements": torch.zeros(2, 6, 0, 5),
}


@pytest.mark.parametrize("name", TENSORS)
def test_layout_of_a_dense_copy_is_known_without_making_it(name):
    x = TENSORS[name]
    assert dense_is_channels_last(x) == is_channels_last(dense(x))


@pytest.mark.parametrize("name", TENSORS)
def test_empty_dense_like_has_the_strides_of_the_dense_copy(name):
    x = TENSORS[name]
    y = empty_dense_like(x, torch.float16)
    assert (y.shape, y.stride(), y.dtype) == (x.shape, dense(x).stride(), torch.float16)
