"""Convolutions of cells, such as wavelets, are products with one matrix."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.rewrite import cells
from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked

PRODUCT = {"cat", "nested_filters", "matrix_of_cells", "linear"}


def along(w, axis, rank):
    """The filters (C, 1, k) for one axis of images or videos, the last one for ``axis`` -1."""
    size = [1] * (rank - 2)
    size[axis] = w.shape[2]
    return w.view(*w.shape[:2], *size)


def conv(x, w, axis, **options):
    w = along(w, axis, x.dim())
    options = {"groups": x.shape[1], "stride": w.shape[2:], **options}
    return getattr(F, f"conv{x.dim() - 2}d")(x, w, **options)


def spread(x, w, axis, **options):
    w = along(w, axis, x.dim())
    options = {"groups": x.shape[1], "stride": w.shape[2:], **options}
    return getattr(F, f"conv_transpose{x.dim() - 2}d")(x, w, **options)


def bands(x, filters):
    """Each of two filters along each axis, in all combinations: the channels of a wavelet transform."""
    found = [x]
    for axis in range(x.dim() - 2):
        found = [conv(v, w[: x.shape[1]], axis) for v in found for w in filters]
    return torch.cat(found, 1)


def inverse(x, filters):
    """Positions from channels, along each axis."""
    found = list(x.chunk(2 ** (x.dim() - 2), 1))
    C = found[0].shape[1]
    for axis in reversed(range(x.dim() - 2)):
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [spread(b, filters[1][:C], axis) + spread(a, filters[0][:C], axis) for a, b in pairs]
    return found[0]


def filters(C, k=2):
    return torch.randn(C, 1, k), torch.randn(C, 1, k)


@pytest.mark.parametrize("size", [(2, 3, 6, 8), (1, 3, 4, 6, 8), (1, 2, 5, 7, 9), (1, 1, 2, 2, 2)])
def test_a_wavelet_transform(size):
    plan = checked(lambda x, *f: bands(x, f), torch.randn(size), *filters(size[1]))
    assert set(plan.steps) == PRODUCT
    assert plan.steps.count("linear") == 1


@pytest.mark.parametrize("size", [(2, 12, 3, 4), (1, 24, 2, 3, 4), (1, 8, 1, 1, 1)])
def test_an_inverse_wavelet_transform(size):
    plan = checked(lambda x, *f: inverse(x, f), torch.randn(size), *filters(size[1]))
    assert set(plan.steps) == PRODUCT
    assert plan.steps.count("linear") == 1


@pytest.mark.parametrize("k", [2, 3])
def test_cells_of_cells(k):
    x, y = torch.randn(1, 2, 2 * k * k, k * k), torch.randn(1, 32, 2, 3)
    forward = checked(lambda x, *f: bands(bands(x, f) / 2.5, f) * 0.5, x, *filters(8, k))
    backward = checked(lambda y, *f: inverse(inverse(y, f) * 2.5, f) / 0.5, y, *filters(8, k))
    for plan, scale in ((forward, 0.2), (backward, 5.0)):
        assert set(plan.steps) == PRODUCT
        assert plan.steps.count("linear") == 1
        assert plan.only(steps.matrix_of_cells).args[1] == pytest.approx(scale)


def test_a_pad_of_elements_in_no_cell():
    def call(x, *f):
        return bands(F.pad(x, (0, 1, 0, 1, 0, 1), mode="reflect"), f)

    assert "pad" not in checked(call, torch.randn(1, 3, 4, 6, 8), *filters(3)).steps
    assert "pad" in checked(call, torch.randn(1, 3, 4, 6, 9), *filters(3)).steps
    in_front = checked(lambda x, *f: bands(F.pad(x, (1, 1)), f), torch.randn(1, 3, 6, 8), *filters(3))
    assert "pad" in in_front.steps


def test_parts_in_any_order():
    x = torch.randn(1, 2, 4, 6)
    a = checked(lambda x, *f: torch.cat([conv(x, f[i], 0) for i in (1, 0, 1)], 1), x, *filters(2))
    b = checked(
        lambda x, *f: spread(x[:, 1:], f[0], 1) + spread(x[:, :1], f[1], 1),
        torch.randn(1, 2, 3, 4),
        *filters(1),
    )
    assert set(a.steps) == set(b.steps) == PRODUCT - {"nested_filters"}


def test_filters_in_16_bits_are_joined_in_fp32():
    plan = checked(lambda x, *f: bands(x, f), torch.randn(1, 3, 6, 8).half(), *(f.half() for f in filters(3)))
    assert plan.all(steps.nested_filters)[-1].meta["dtype"] is torch.float32
    assert plan.only(steps.matrix_of_cells).meta["dtype"] is torch.float16


def test_what_others_read_is_computed():
    x, f = torch.randn(1, 3, 4, 6), filters(3)
    for call in (
        lambda x, a, b: (y := conv(x, a, 0), torch.cat([y, conv(x, b, 0)], 1)),
        lambda x, a, b: (y := conv(x, a, 0), torch.cat([conv(y, a, 1), conv(y, b, 1)], 1))[::-1],
        lambda x, a, b: (y := spread(x[:, :1], a[:1], 0), y + spread(x[:, 1:2], b[:1], 0)),
    ):
        assert "conv" in checked(call, x, *f).steps


def test_a_scaled_value_that_others_read_stays():
    plan = checked(lambda x, *f: (y := bands(x, f), y / 2.0), torch.randn(1, 2, 4, 6), *filters(2))
    assert "aten.div" in plan.steps


NEAR_MISSES = {
    "windows overlap": lambda x, a, b: torch.cat([conv(x, w, 0, stride=1) for w in (a, b)], 1),
    "there are gaps": lambda x, a, b: torch.cat([conv(x, w, 0, stride=(3, 1)) for w in (a, b)], 1),
    "dilated": lambda x, a, b: torch.cat([conv(x, w, 0, dilation=2) for w in (a, b)], 1),
    "padded": lambda x, a, b: torch.cat([conv(x, w, 0, padding=1) for w in (a, b)], 1),
    "with a bias": lambda x, a, b: torch.cat([conv(x, w, 0, bias=w[:, 0, 0]) for w in (a, b)], 1),
    "of several channels": lambda x, a, b: torch.cat(
        [F.conv2d(x, w.expand(2, 2, 2)[..., None], stride=(2, 1)) for w in (a, b)], 1
    ),
    "several filters": lambda x, a, b: torch.cat(
        [conv(x, torch.cat([a, b]), 0), conv(x, torch.cat([b, a]), 0)], 1
    ),
    "of two values": lambda x, a, b: torch.cat([conv(x, a, 0), conv(F.relu(x), b, 0)], 1),
    "of cells of two sizes": lambda x, a, b: torch.cat(
        [conv(x, a, 0)[:, :, :3, :3], conv(x, b, 1)[:, :, :3, :3]], 1
    ),
    "along another axis": lambda x, a, b: torch.cat([conv(x, a, 0), conv(x, b, 0)], 2),
    "one convolution": lambda x, a, b: torch.cat([conv(x, a, 0), x[:, :, :3]], 1),
    "a part of the channels": lambda x, a, b: spread(x[:, :1], a[:1], 0) + spread(x[:, 1:2], b[:1], 0),
    "a channel twice": lambda x, a, b: spread(x[:, :2], a[:2], 0) + spread(x[:, :2], b[:2], 0),
    "weighted": lambda x, a, b: torch.add(spread(x[:, :2], a, 0), spread(x[:, 2:], b, 0), alpha=2),
    "subtracted": lambda x, a, b: spread(x[:, :2], a, 0) - spread(x[:, 2:], b, 0),
    "spread with gaps": lambda x, a, b: spread(x[:, :2], a, 0, stride=3) + spread(x[:, 2:], b, 0, stride=3),
    "spread with more": lambda x, a, b: sum(
        spread(v, w, 0, output_padding=(1, 0)) for v, w in ((x[:, :2], a), (x[:, 2:], b))
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    C = 4 if name.startswith(("a ", "weighted", "subtracted", "spread")) else 2
    assert "conv" in checked(NEAR_MISSES[name], torch.randn(2, C, 6, 6), *filters(2)).steps


def test_other_dtypes_and_empty_values_stay():
    for x in (torch.randn(1, 2, 4, 6).double(), torch.randn(0, 2, 4, 6)):
        found = checked(lambda x, *f: bands(x, f), x, *(f.to(x.dtype) for f in filters(2)))
        assert "conv" in found.steps


def test_large_matrices_stay(monkeypatch):
    """The matrix of one transform, and that of two that follow each other."""

    def two(x, a, b):
        return torch.cat([conv(conv(x, w[: x.shape[1]], 0), w[: x.shape[1]], 1) for w in (a, b)], 1)

    x, f = torch.randn(1, 2, 8, 8), filters(4)
    for most, count in ((7, 0), (8, 1), (16, 2), (31, 2), (32, 1)):
        monkeypatch.setattr(cells, "MOST", most)
        plan = checked(lambda x, *f: two(two(x, *f), *f), x, *f)
        assert (most, plan.steps.count("linear")) == (most, count)
