"""Comparison of images and tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sdfastgn.bench.images import psnr, relative_error, row_errors, ssim


def test_psnr_of_a_known_difference():
    a = np.zeros((1, 4, 4, 3))
    assert psnr(a + 0.1, a) == pytest.approx(20.0)
    assert psnr(a, a) == math.inf
    assert math.isnan(psnr(a * math.nan, a))


def test_relative_error_of_a_known_difference():
    b = torch.tensor([3.0, 4.0])
    assert relative_error(b * 1.1, b) == pytest.approx(0.1, rel=1e-5)
    assert math.isnan(relative_error(b * math.nan, b))


@pytest.mark.parametrize("as_image", [False, True])
def test_errors_of_rows(as_image):
    """One large row of twenty hides nothing. Rows of zeros that are right have no error."""
    b = torch.ones(20, 4)
    b[0] *= 1e6
    b[1] = 0
    a = b * torch.tensor([1.0, 1.0, *[1.25] * 16, *[1.5] * 2])[:, None]
    if as_image:
        a, b = (t.T.reshape(1, 4, 5, 4) for t in (a, b))
    assert row_errors(a, b) == (0.25, 0.5)
    assert relative_error(a, b) < 1e-5
    assert row_errors(b, b) == (0.0, 0.0)
    a[0, 0] = math.nan
    assert all(map(math.isnan, row_errors(a, b)))


def test_ssim_of_what_is_known():
    a = np.random.default_rng(0).uniform(0, 1, (2, 16, 12, 3))
    assert ssim(a, a) == pytest.approx(1, abs=1e-12)
    assert ssim(a, 1 - a) < 0
    assert math.isnan(ssim(a * math.nan, a))


def test_ssim_is_the_published_formula():
    """Window by window in NumPy, as equations 13 to 16 of the paper have it."""
    rng = np.random.default_rng(1)
    a = rng.uniform(0, 1, (14, 13, 2))
    b = np.clip(a + rng.normal(0, 0.1, a.shape), 0, 1)
    axis = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    weights = np.outer(axis, axis) / np.outer(axis, axis).sum()
    values = []
    for top, left, channel in np.ndindex(14 - 10, 13 - 10, 2):
        x, y = (each[top : top + 11, left : left + 11, channel] for each in (a, b))
        mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
        variance_x, variance_y = (weights * (x - mean_x) ** 2).sum(), (weights * (y - mean_y) ** 2).sum()
        covariance = (weights * (x - mean_x) * (y - mean_y)).sum()
        top_part = (2 * mean_x * mean_y + 0.01**2) * (2 * covariance + 0.03**2)
        values.append(top_part / ((mean_x**2 + mean_y**2 + 0.01**2) * (variance_x + variance_y + 0.03**2)))
    assert ssim(a, b) == pytest.approx(np.mean(values), rel=1e-9)


def test_ssim_needs_a_window():
    with pytest.raises(ValueError, match=r"ssim: expected images of at least 11x11 pixels.*\(10, 20, 3\)"):
        ssim(np.zeros((10, 20, 3)), np.zeros((10, 20, 3)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: psnr(np.zeros(3), np.zeros(4)),
        lambda: ssim(np.zeros((11, 11, 3)), np.zeros((11, 11, 1))),
        lambda: relative_error(torch.ones(3), torch.ones(4)),
        lambda: row_errors(torch.ones(3), torch.ones(4)),
    ],
    ids=["psnr", "ssim", "relative", "rows"],
)
def test_shapes_must_agree(call):
    with pytest.raises(ValueError, match="shapes differ"):
        call()
