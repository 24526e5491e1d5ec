"""The kernels of ``channel_norm`` against fp64: interpreted, and on a GPU where there is one."""

import functools

import pytest
import torch

from sdfastgn.kernels.channel_norm import op as op_file
from sdfastgn.kernels.channel_norm.config import fits, fits_with_sums, grad_config, rows_config
from sdfastgn.kernels.channel_norm.op import channel_norm
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.common.sizes import vector_width
from tests.kernels.gradients import grads_of
from tests.kernels.ops import true_channel_norm as eager
from tests.kernels.samples import (
    BOUNDS,
    DTYPES,
    LAYOUTS,
    PLACES,
    error,
    in_fp64,
    kernels,
    make,
    skip_cut_off,
)

NUM_SMS = 1
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.multiprocessors(NUM_SMS)]

# Of x, (N, C, *spatial).
SHAPES = [
    pytest.param((700, 3), id="rank2-short"),
    pytest.param((2, 30, 7), id="rank3-odd"),
    pytest.param((2, 96, 3, 5), id="image"),
    pytest.param((1, 48, 2, 3, 4), id="video"),
    pytest.param((2, 1, 5), id="one-channel"),
    pytest.param((1, 640, 3), id="several-warps"),
    pytest.param((1, 3000, 2), id="several-warps-odd"),
    pytest.param((3, 8, 1, 1), id="one-position"),
]
WAYS = [pytest.param((2, 30, 2, 3, 3), id="narrow"), pytest.param((1, 1500, 3), id="wide")]
SILU = {"activation": "silu"}

run = kernels()(channel_norm)
truth = in_fp64(eager)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, layout, device):
    x, weight, bias = make(shape, device=device, layout=layout)
    for affine in ((weight, bias), (weight, None), (None, bias), (None, None)):
        y = run(x, *affine, shape[1] ** 0.5, **SILU)
        assert y.movedim(1, -1).is_contiguous()
        assert error(y, truth(x, *affine, shape[1] ** 0.5, **SILU)) < BOUNDS[torch.float32]


def test_the_shapes_take_every_way():
    sizes = [(torch.Size(p.values[0]).numel() // p.values[0][1], p.values[0][1]) for p in SHAPES]
    forwards = [rows_config(rows, C, 4, vector_width(4, C), NUM_SMS) for rows, C in sizes]
    backwards = [grad_config(rows, C, vector_width(4, C), NUM_SMS, column_sums=True) for rows, C in sizes]
    for configs in (forwards, backwards):
        assert {config.wide for config in configs} == {True, False}
        assert max(config.lanes for config in configs) > 1
    tiles = [-(-rows // config.rows) for (rows, _), config in zip(sizes, backwards, strict=True)]
    assert any(config.programs < count for config, count in zip(backwards, tiles, strict=True))


@pytest.mark.parametrize("activation", ["identity", "relu", "silu", "mish", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WAYS)
def test_every_dtype_and_activation(shape, dtype, activation, device):
    x, weight, bias = make(shape, dtype, device)
    y = run(x, weight, bias, 5.0, activation=activation)
    assert y.dtype == dtype
    assert error(y, truth(x, weight, bias, 5.0, activation=activation)) < BOUNDS[dtype]


@pytest.mark.parametrize("place", PLACES)
def test_every_place_in_memory(place, device):
    x, weight, bias = make((2, 6, 3, 4))
    x, weight, bias = (place(t).to(device) for t in (x, weight, bias))
    y = run(x, weight, bias, 2.0)
    assert is_channels_last(y)
    assert error(y, truth(x, weight, bias, 2.0)) < BOUNDS[torch.float32]


def as_upstream(x, weight, scale):
    """diffusers' WanRMS_norm and SiLU, rounding where they round."""
    normalized = torch.nn.functional.normalize(x.float(), dim=1).to(x.dtype)
    return torch.nn.functional.silu(normalized * scale * weight.reshape(-1, *[1] * (x.dim() - 2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 30.0], ids=["centred", "large"])
@pytest.mark.parametrize("shape", WAYS)
def test_no_less_exact_than_upstream(shape, mean, dtype, device):
    skip_cut_off(dtype, device)
    x, weight, _ = make(shape, dtype, device, mean=mean)
    scale = shape[1] ** 0.5
    expected = truth(x, weight, None, scale, **SILU)
    slack = (2 if dtype is torch.float32 else 0.1) * torch.finfo(dtype).eps
    assert error(run(x, weight, None, scale, **SILU), expected) <= (
        error(as_upstream(x, weight, scale), expected) + slack
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WAYS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_not_finite_and_zero_and_large_rows_are_as_eagers(shape, dtype, device):
    x, weight, bias = make(shape, dtype, device, layout="channels_first")
    flat = x.flatten(2)
    large = min(torch.finfo(dtype).max, 1e15)
    flat[0, :, 0] = 0
    flat[0, 1, 1] = float("nan")
    flat[0, 1, 2] = float("inf")
    if flat.shape[2] > 4:
        flat[0, 2, 3] = -large
        flat[0, :, 4] = large
    scale = shape[1] ** 0.5
    y, expected = (
        run(x, weight, bias, scale, **SILU),
        eager(x.float(), weight.float(), bias.float(), scale, **SILU),
    )
    assert expected.isnan().any()
    assert torch.equal(y.isnan(), expected.isnan())
    torch.testing.assert_close(
        y.float().nan_to_num(7.0), expected.nan_to_num(7.0), rtol=4 * BOUNDS[dtype], atol=4 * BOUNDS[dtype]
    )


def test_a_zero_row_gives_the_activation_of_the_bias(device):
    x, weight, bias = make((1, 30, 4), device=device)
    x.zero_()
    y = run(x, weight, bias, 5.0, **SILU)
    torch.testing.assert_close(y, torch.nn.functional.silu(bias)[None, :, None].expand_as(y))


@pytest.mark.parametrize("eps", [1e-12, 0.5, 100.0])
def test_eps_is_the_least_divisor(eps, device):
    x, weight, bias = make((1, 12, 9), device=device)
    x *= torch.linspace(0, 1, 9, device=device)
    leaves = (x, weight, bias)
    call = functools.partial(channel_norm, scale=3.0, eps=eps)
    exact = functools.partial(eager, scale=3.0, eps=eps)
    assert error(run(*leaves, scale=3.0, eps=eps), in_fp64(exact)(*leaves)) < BOUNDS[torch.float32]
    dy = make((1, 12, 9), device=device, seed=5)[0]
    dy[..., 0] = 0  # of a zero row, whose gradient is 1 / eps times dy
    for got, want in zip(grads_of(call, leaves, dy), grads_of(exact, leaves, dy, torch.float64), strict=True):
        assert error(got, want) < 1e-5


@pytest.mark.parametrize("shape", WAYS)
def test_nothing_else_is_read_or_written(shape, device):
    x, weight, bias = make(shape, device=device)
    C = shape[1]
    rows = x.numel() // C
    buffer = torch.full(((rows + 2) * C,), float("nan"), device=device)
    inside = buffer[C:-C].view(shape[0], *shape[2:], C).movedim(-1, 1)
    inside.copy_(x)
    before = buffer.clone()
    assert torch.equal(run(inside, weight, bias), run(x, weight, bias))
    assert torch.equal(buffer.nan_to_num(7.0), before.nan_to_num(7.0))


# --- backward -----------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["dispatcher", "direct"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, direct, device):
    leaves, dy = make(shape, device=device), make(shape, device=device, seed=9)[0]
    call = functools.partial(channel_norm, scale=shape[1] ** 0.5, **SILU)
    want = grads_of(functools.partial(eager, scale=shape[1] ** 0.5, **SILU), leaves, dy, torch.float64)
    ours = grads_of(call, leaves, dy, direct=direct)
    assert all(map(torch.equal, ours, grads_of(call, leaves, dy, direct=direct)))
    for leaf, got, exact in zip(leaves, ours, want, strict=True):
        assert got.shape == leaf.shape
        # One channel's gradient is nothing but rounding: x / |x| does not depend on x.
        assert (got - exact).norm() <= 2e-6 * max(exact.norm(), dy.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("shape", WAYS)
def test_gradients_no_less_exact_than_eager(shape, activation, dtype, device):
    skip_cut_off(dtype, device)
    leaves, dy = make(shape, dtype, device), make(shape, dtype, device, seed=9)[0]
    options = {"scale": shape[1] ** 0.5, "activation": activation}
    exact = grads_of(functools.partial(eager, **options), leaves, dy, torch.float64)
    stock = grads_of(functools.partial(eager, **options), leaves, dy)
    ours = grads_of(functools.partial(channel_norm, **options), leaves, dy)
    for got, theirs, want in zip(ours, stock, exact, strict=True):
        assert got.dtype is dtype
        slack = 0.5 * torch.finfo(dtype).eps * want.norm()
        assert (got - want).norm() <= (theirs - want).norm() * 1.05 + slack


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bias_that_is_not_finite_stays_in_its_column(device):
    """Rows of a tile that are not there must not make 0 * inf."""
    x, weight, bias = make((1, 30, 7), device=device)
    bias[3] = float("inf")
    dy = make((1, 30, 7), device=device, seed=9)[0]
    call = functools.partial(channel_norm, eps=0.0, activation="silu")
    grads = grads_of(call, (x, weight, bias), dy)
    assert all(g.isfinite().reshape(-1, 30)[:, [0, 1, 2, *range(4, 30)]].all() for g in grads[1:])


# --- sizes --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 6, 3), (2, 6, 0, 3), (2, 0, 3)])
def test_empty(shape, device):
    x = torch.zeros(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[1], device=device, requires_grad=True)
    with kernels(direct=True):
        y = channel_norm(x, weight)
        assert y.shape == shape
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == shape
    assert torch.equal(dweight, torch.zeros_like(weight))


def test_more_channels_than_registers_hold_run_in_pytorch(monkeypatch, device):
    assert fits(16384)
    assert not fits(16385)
    assert fits_with_sums(8192)
    assert not fits_with_sums(8193)
    monkeypatch.setattr(op_file, "fits", lambda C: C < 12)
    monkeypatch.setattr(op_file, "fits_with_sums", lambda C: C < 12)
    leaves, dy = make((2, 13, 5), device=device), make((2, 13, 5), device=device, seed=9)[0]
    ours = grads_of(channel_norm, leaves, dy, direct=True)
    for got, want in zip(ours, grads_of(eager, leaves, dy, torch.float64), strict=True):
        assert error(got, want) < 1e-5


# --- GPU ----------------------------------------------------------------------

GPU_SHAPES = [(1, 96, 4, 480, 832), (1, 384, 1, 60, 104), (1, 1024, 2, 30, 52), (3, 30, 1001)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_real_shapes_on_the_gpu(shape, dtype):
    x, weight, bias = make(shape, dtype, "cuda", mean=0.0)
    options = {"scale": shape[1] ** 0.5, **SILU}
    assert error(run(x, weight, bias, **options), truth(x, weight, bias, **options)) < BOUNDS[dtype]
    dy = make(shape, dtype, "cuda", mean=0.0, seed=9)[0]
    ours = grads_of(functools.partial(channel_norm, **options), (x, weight, bias), dy)
    exact = grads_of(functools.partial(eager, **options), (x, weight, bias), dy, torch.float64)
    for got, want in zip(ours, exact, strict=True):
        assert error(got, want) < 4 * BOUNDS[dtype]
