"""Comparison of images and tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sdfastgn.bench.images import psnr, relative_error


def test_psnr_of_a_known_difference():
    a = np.zeros((1, 4, 4, 3))
    assert psnr(a + 0.1, a) == pytest.approx(20.0)
    assert psnr(a, a) == math.inf
    assert math.isnan(psnr(a * math.nan, a))


def test_relative_error_of_a_known_difference():
    b = torch.tensor([3.0, 4.0])
    assert relative_error(b * 1.1, b) == pytest.approx(0.1, rel=1e-5)
    assert math.isnan(relative_error(b * math.nan, b))


@pytest.mark.parametrize(
    "call",
    [lambda: psnr(np.zeros(3), np.zeros(4)), lambda: relative_error(torch.ones(3), torch.ones(4))],
    ids=["psnr", "relative"],
)
def test_shapes_must_agree(call):
    with pytest.raises(ValueError, match="shapes differ"):
        call()
