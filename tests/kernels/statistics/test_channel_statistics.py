"""The kernels that take statistics while they read, add or concatenate, against fp64."""

import pytest
import torch

from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.sizes import ceil_div
from sdfastgn.kernels.statistics import kernels as statistics_kernels
from sdfastgn.kernels.statistics import op as channel_statistics
from sdfastgn.kernels.statistics.config import statistics_config
from sdfastgn.kernels.statistics.op import reference_channel_statistics
from tests.kernels.samples import (
    BOUNDS,
    DTYPES,
    LAYOUTS,
    assert_statistics,
    checked,
    error,
    first_alone,
    make,
    run,
    run_add,
    run_cat,
    run_statistics,
    to_layout,
    truth,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# (shape, multiprocessors): with few, small tensors have chunks of several tiles.
CASES = [
    pytest.param((2, 10, 7, 9), 132, id="odd"),
    pytest.param((1, 66, 5, 7), 132, id="c-not-a-multiple-of-the-block"),
    pytest.param((3, 1, 4, 5), 132, id="one-channel"),
    pytest.param((2, 6, 1, 1), 132, id="one-pixel"),
    pytest.param((1, 64, 16), 132, id="rank3"),
    pytest.param((1, 10, 3, 4, 5), 132, id="rank5"),
    pytest.param((1, 64, 16, 16), 132, id="whole-tiles"),
    pytest.param((1, 66, 37, 29), 1, id="long-odd"),
    pytest.param((1, 64, 1024), 1, id="long-whole-channels-last"),
    pytest.param((1, 8, 8192), 1, id="long-whole-channels-first"),
    pytest.param((1, 7, 12300), 1, id="long-odd-channels-first"),
]
FP32_EPS = torch.finfo(torch.float32).eps


@pytest.fixture
def few_sms(monkeypatch):
    """As on a GPU with this number of multiprocessors."""

    def patch(count):
        monkeypatch.setattr(gpu, "num_sms", lambda device: count)
        monkeypatch.setattr(channel_statistics, "_launches", {})

    return patch


def inputs(shape, dtype=torch.float32, device="cpu", layout="channels_last", mean=3.0):
    """(x, residual, bias)"""
    x, bias, _ = make(shape, dtype, device, layout, mean)
    return x, make(shape, dtype, device, layout, mean=-1.0, seed=1)[0], bias


def sum_of(x, residual, bias=None, scale=1.0):
    total = x.double() + residual.double()
    if bias is not None:
        total += bias.double().view(-1, *[1] * (x.dim() - 2))
    return total * scale


def test_the_cases_take_every_way_through_the_kernel():
    for channels_last in (True, False):
        for producer in (True, False):
            ways = set()
            for shape, num_sms in (p.values for p in CASES):
                N, C, HW = shape[0], shape[1], torch.Size(shape[2:]).numel()
                config = statistics_config(
                    N, C, HW, channels_last, num_sms, kind="write" if producer else "read"
                )
                even = statistics_kernels.is_even(config, C, HW, channels_last)
                ways.add((config.rows > config.tile_rows, config.chunks > 1, even))
            assert {(loop, even) for loop, _, even in ways} == {
                (a, b) for a in (True, False) for b in (True, False)
            }
            assert {several for _, several, _ in ways} == {True, False}


@pytest.mark.parametrize("chunks", [1, 2, 4, 5, 9, 12])
def test_the_reference_by_the_definition(chunks):
    x = torch.randn(2, 3, 9, dtype=torch.float64) + 5
    statistics = reference_channel_statistics(x, chunks)
    rows = ceil_div(9, chunks)
    for p in range(chunks):
        part = x[:, :, p * rows : (p + 1) * rows]
        if part.shape[2]:
            torch.testing.assert_close(statistics[0, :, p], part.mean(2))
            torch.testing.assert_close(statistics[1, :, p], part.var(2, correction=0) * part.shape[2])
        else:
            assert (statistics[:, :, p] == 0).all()


# --- the three kernels --------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", first_alone(DTYPES[::-1]))
@pytest.mark.parametrize(("shape", "num_sms"), CASES)
def test_statistics(shape, num_sms, dtype, layout, device, few_sms):
    few_sms(num_sms)
    x = make(shape, dtype, device, layout)[0]
    before = x.clone()
    assert_statistics(run_statistics(x), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize(("shape", "num_sms"), CASES)
def test_add(shape, num_sms, dtype, layout, device, few_sms):
    few_sms(num_sms)
    x, residual, bias = inputs(shape, dtype, device, layout)
    y, statistics = run_add(x, residual, bias, scale=0.7)
    assert y.dtype is dtype
    assert y.stride() == x.stride()
    assert error(y, sum_of(x, residual, bias, 0.7)) < BOUNDS[dtype]
    assert_statistics(statistics, y)


@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize("tail", first_alone([5, 1, 64]))
@pytest.mark.parametrize(("shape", "num_sms"), CASES)
def test_cat(shape, num_sms, tail, dtype, device, few_sms):
    few_sms(num_sms)
    a = make(shape, dtype, device)[0]
    b = make((shape[0], tail, *shape[2:]), dtype, device, mean=-2.0, seed=1)[0]
    y, statistics = run_cat(a, b)
    assert torch.equal(y, torch.cat((a, b), 1))
    assert y.movedim(1, -1).is_contiguous()
    assert_statistics(statistics, y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "num_sms"), first_alone([CASES[i] for i in (7, 0, 1, 3, 8, 10)]))
def test_sums_and_concatenations_without_statistics(shape, num_sms, layout, device, few_sms):
    """The same bits as with them."""
    few_sms(num_sms)
    x, residual, bias = inputs(shape, torch.float16, device, layout)
    y, statistics = channel_statistics.add_kernel(x, residual, bias, 0.7, emits=False)
    assert statistics is None
    assert torch.equal(y, run_add(x, residual, bias, scale=0.7)[0])
    assert y.stride() == x.stride()
    if layout == "channels_last":
        y, statistics = channel_statistics.cat_kernel(x, residual, emits=False)
        assert statistics is None
        assert torch.equal(y, torch.cat((x, residual), 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "out-of-place"])
@pytest.mark.parametrize(("shape", "num_sms"), first_alone([CASES[i] for i in (7, 0, 1, 3, 8, 10)]))
def test_a_bias_alone(shape, num_sms, in_place, layout, device, few_sms):
    few_sms(num_sms)
    x, _, bias = inputs(shape, torch.float16, device, layout)
    expected, before = sum_of(x, torch.zeros_like(x), bias), x.clone()
    y, statistics = channel_statistics.add_kernel(x, None, bias, 1.0, out=x if in_place else None)
    assert (y is x) == in_place
    assert torch.equal(x, before) != in_place
    assert error(y, expected) < BOUNDS[torch.float16]
    assert_statistics(statistics, y)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh", "mish"])
@pytest.mark.parametrize(("shape", "num_sms"), first_alone([CASES[i] for i in (7, 0, 2, 3, 8)]))
def test_an_activation_of_a_sum(shape, num_sms, activation, layout, device, few_sms):
    """It is computed before the sum is rounded. A residual in other strides is copied first."""
    few_sms(num_sms)
    x, residual, bias = inputs(shape, torch.float16, device, layout, mean=0.0)
    expected = ACTIVATIONS[activation](sum_of(x, residual, bias, 0.7))
    other = to_layout(residual, "channels_first" if layout == "channels_last" else "channels_last")
    for r in (residual, other):
        for emits in (True, False):
            y, statistics = channel_statistics.add_kernel(x, r, bias, 0.7, emits=emits, activation=activation)
            assert y.stride() == x.stride()
            assert error(y, expected) < BOUNDS[torch.float16]
            if emits:
                assert_statistics(statistics, y)
    expected = ACTIVATIONS[activation](sum_of(x, torch.zeros_like(x), bias))
    y, _ = channel_statistics.add_kernel(x, None, bias, 1.0, out=x, emits=False, activation=activation)
    assert y is x
    assert error(y, expected) < BOUNDS[torch.float16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_of_other_dtypes_and_strides(dtype, device):
    x, residual, bias = inputs((2, 10, 7, 18), dtype, device, mean=0.0)
    x, residual, bias = x[..., ::2], residual[..., ::2], torch.stack((bias, bias), 1)[:, 0]
    expected = ACTIVATIONS["silu"](sum_of(x, residual, bias))
    y, statistics = channel_statistics.add_kernel(x, residual, bias, 1.0, activation="silu")
    assert error(y, expected) < BOUNDS[dtype]
    assert_statistics(statistics, y)


@pytest.mark.parametrize(
    "layouts",
    [
        ("channels_first", "channels_first"),
        ("channels_first", "channels_last"),
        ("channels_last", "channels_first"),
    ],
)
def test_cat_of_other_layouts(layouts, device):
    """Not in one pass, but with the layout of the first."""
    a, b = (
        make((2, 30, 7, 9), device=device, layout=layouts[0])[0],
        make((2, 5, 7, 9), device=device, layout=layouts[1])[0],
    )
    for first, second in ((a, b), (a[..., ::2], b[..., ::2])):
        y, statistics = run_cat(first, second)
        assert torch.equal(y, torch.cat((first, second), 1))
        assert_statistics(statistics, y)
    assert run_cat(a, b)[0].stride() == to_layout(torch.empty(2, 35, 7, 9), layouts[0]).stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["none", "float32", "bfloat16", "float64", "strided"])
def test_add_with_any_bias(kind, layout, device):
    x, residual, bias = inputs((2, 30, 7, 9), torch.float16, device, layout)
    if kind == "none":
        bias = None
    elif kind == "strided":
        bias = torch.stack((bias, bias + 100), 1)[:, 0]
    else:
        bias = (bias.float() * 1.001).to(getattr(torch, kind))
    y, statistics = run_add(x, residual, bias)
    assert y.dtype is torch.float16
    assert error(y, sum_of(x, residual, bias)) < BOUNDS[torch.float16]
    assert_statistics(statistics, y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda r: to_layout(r, "channels_first"), id="channels-first"),
        pytest.param(lambda r: to_layout(r, "channels_last"), id="channels-last"),
        pytest.param(lambda r: torch.cat((r, r), 1)[:, :30], id="gaps"),
        pytest.param(lambda r: r[:, :, :1, :1].expand(r.shape), id="expanded"),
    ],
)
def test_add_of_a_residual_with_other_strides(view, layout, device):
    x, residual, bias = inputs((2, 30, 7, 9), device=device, layout=layout)
    residual = view(residual)
    y, statistics = run_add(x, residual, bias)
    assert y.stride() == x.stride()
    assert error(y, sum_of(x, residual, bias)) < BOUNDS[torch.float32]
    assert_statistics(statistics, y)


def test_views_with_gaps(device):
    base = make((2, 24, 6, 7), device=device)[0]
    for x in (base[:, :12], base[..., ::2], base.contiguous()[:, ::2], base[:1].expand(3, -1, -1, -1)):
        assert_statistics(run_statistics(x), x)
        y, statistics = run_add(x, x)
        assert error(y, 2 * x.double()) < BOUNDS[torch.float32]
        assert y.stride().index(min(y.stride())) == x.stride().index(min(s for s in x.stride() if s))
        assert_statistics(statistics, y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "num_sms"), [CASES[0], CASES[7], CASES[10]])
def test_a_mean_1000_times_the_deviation(shape, num_sms, layout, device, few_sms):
    few_sms(num_sms)
    x, residual, _ = inputs(shape, device=device, layout=layout, mean=1500.0)
    assert_statistics(run_statistics(x), x)
    y, statistics = run_add(x, residual)
    assert_statistics(statistics, y)
    if layout == "channels_last":
        assert_statistics(run_cat(x, residual)[1], torch.cat((x, residual), 1))
    # End to end no worse than means that are rounded to fp32, which is what statistics can say.
    norm = run(y, 1, statistics=statistics)
    assert error(norm, truth(y, 1)) < FP32_EPS * 1500 / 1.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "num_sms"), [CASES[0], CASES[7]])
def test_an_outlier_in_the_first_pixel(shape, num_sms, layout, device, few_sms):
    """The first tile's mean is then far from everything else."""
    few_sms(num_sms)
    x = make(shape, device=device, layout=layout)[0]
    x[(..., *[0] * (len(shape) - 2))] = 3000.0
    assert_statistics(run_statistics(x), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_nan_and_inf_stay_in_their_channel_and_chunk(value, layout, device, few_sms):
    few_sms(1)
    x = make((1, 66, 37, 29), device=device, layout=layout)[0]
    clean = run_statistics(x)
    x[0, 3, 20, 7] = value
    statistics = run_statistics(x)
    chunk = (20 * 29 + 7) // ceil_div(37 * 29, statistics.shape[2])
    assert not statistics[0, 0, chunk, 3].isfinite()
    statistics[:, 0, chunk, 3] = clean[:, 0, chunk, 3]
    assert torch.equal(statistics, clean)


def test_the_scale_is_part_of_the_launch(device):
    """Launches are cached: one for another scale or bias must not serve."""
    x, residual, bias = inputs((2, 30, 7, 9), device=device)
    for scale in (1.0, 0.5, -2.0, 1.0, 0.0):
        for b in (bias, None, bias.double()):
            y, statistics = run_add(x, residual, b, scale=scale)
            torch.testing.assert_close(y.double(), sum_of(x, residual, b, scale), atol=1e-5, rtol=1e-5)
            assert_statistics(statistics, y)


@pytest.mark.parametrize("shape", [(0, 8, 4, 4), (2, 0, 4, 4), (2, 8, 0, 4)], ids=str)
def test_empty(shape, device):
    x = torch.empty(shape, device=device)
    bias = torch.ones(shape[1], device=device)
    y, statistics = run_add(x, x, bias)
    assert y.shape == shape
    for found in (statistics, run_statistics(x)):
        assert found.shape == (2, shape[0], 1, shape[1])
        assert (found == 0).all()
    y, statistics = run_cat(x, x)
    assert y.shape == (shape[0], 2 * shape[1], *shape[2:])
    assert statistics.shape == (2, shape[0], 1, 2 * shape[1])
    one = torch.ones((2, 3, 4, 4), device=device)
    assert torch.equal(run_cat(one, one[:, :0])[0], one)


# --- into GroupNorm -----------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", first_alone(DTYPES))
@pytest.mark.parametrize(("shape", "num_sms"), [CASES[0], CASES[5], CASES[7]])
def test_what_producers_hand_out_feeds_group_norm(shape, num_sms, dtype, layout, device, few_sms):
    few_sms(num_sms)
    x, residual, bias = inputs(shape, dtype, device, layout)
    made = [(x, run_statistics(x)), run_add(x, residual, bias, scale=0.7), run_cat(x, residual)]
    for y, statistics in made:
        _, weight, offset = make(y.shape, dtype, device, seed=3)
        shift = torch.randn(y.shape[:2], generator=torch.Generator().manual_seed(2)).to(device, dtype)
        for operands in ({}, {"shift": shift}):
            norm = checked(y, 2, weight, offset, activation="silu", statistics=statistics, **operands)
            assert norm.stride() == y.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "tail"),
    [
        pytest.param((2, 320, 64, 64), 320, id="2x320x64x64"),
        pytest.param((1, 512, 128, 128), 256, id="1x512x128x128"),
        pytest.param((2, 640, 32, 32), 320, id="2x960x32x32"),
        pytest.param((2, 1280, 8, 8), 1280, id="2x1280x8x8"),
        pytest.param((1, 512, 256, 256), 128, id="1x512x256x256"),
        pytest.param((2, 320, 14, 32, 32), 320, id="video"),
        pytest.param((1, 330, 95, 137), 64, id="odd"),
    ],
)
def test_real_shapes_on_the_gpu(shape, tail, dtype, layout):
    x, residual, bias = inputs(shape, dtype, "cuda", layout)
    y, statistics = run_add(x, residual, bias, scale=0.7)
    assert y.stride() == x.stride()
    assert error(y, sum_of(x, residual, bias, 0.7)) < BOUNDS[dtype]
    joined, joined_statistics = run_cat(x, residual[:, :tail].clone(memory_format=torch.preserve_format))
    assert torch.equal(joined, torch.cat((x, residual[:, :tail]), 1))
    for t, s in ((x, run_statistics(x)), (y, statistics), (joined, joined_statistics)):
        assert_statistics(s, t)
        checked(t, 32 if t.shape[1] % 32 == 0 else 2, activation="silu", statistics=s)


@pytest.mark.gpu
@pytest.mark.gigabytes
def test_chunks_of_more_than_2_to_the_31_elements():
    """2^34 elements: a multiprocessor's share would be a chunk of 2^32."""
    C = 65536
    x = torch.empty((1, C, 512, 512), dtype=torch.float16, device="cuda", memory_format=torch.channels_last)
    pixels = x.permute(0, 2, 3, 1).view(-1, C)
    for part in pixels.split(4096):  # 0.5 GiB at a time
        part.normal_(2.0, 1.5)
    statistics = run_statistics(x)
    rows = ceil_div(len(pixels), statistics.shape[2])
    assert rows * C < 2**31
    last = pixels[(statistics.shape[2] - 1) * rows :]
    for c in (0, C - 64):
        part = last[:, c : c + 64].double()
        var, mean = torch.var_mean(part, 0, correction=0)
        torch.testing.assert_close(statistics[0, 0, -1, c : c + 64].double(), mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            statistics[1, 0, -1, c : c + 64].double(), var * len(part), rtol=1e-5, atol=0
        )
