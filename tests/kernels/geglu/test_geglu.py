"""The kernels of ``geglu`` against fp64: interpreted, and on a GPU where there is one."""

import pytest
import torch

from sdfastgn.kernels.common.sizes import vector_width
from sdfastgn.kernels.geglu.config import backward_config, forward_config
from sdfastgn.kernels.geglu.op import geglu
from tests.kernels.gradients import grads_of
from tests.kernels.ops import true_geglu as eager
from tests.kernels.samples import BOUNDS, DTYPES, error, in_fp64, kernels, skip_cut_off

NUM_SMS = 1
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.multiprocessors(NUM_SMS)]

# Of x, (..., 2D).
SHAPES = [
    pytest.param((7, 10), id="short-rows"),
    pytest.param((700, 20), id="many-short-rows"),
    pytest.param((5, 66), id="odd"),
    pytest.param((2, 3, 640), id="rank3"),
    pytest.param((64, 512), id="even-tiles"),
    pytest.param((3, 2048), id="several-blocks"),
    pytest.param((2, 2, 3, 100), id="rank4"),
    pytest.param((40,), id="rank1"),
    pytest.param((3, 2), id="one-column"),
]
WAYS = [pytest.param((8, 512), id="even"), pytest.param((9, 330), id="masked")]


def make(shape, dtype=torch.float32, device="cpu", mean=0.5, seed=0):
    """x and bias."""
    g = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(shape, generator=g) * 1.5 + mean, torch.randn(shape[-1], generator=g)
    return x.to(dtype).to(device), bias.to(dtype).to(device)


def gradient(shape, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(9)
    return (torch.randn((*shape[:-1], shape[-1] // 2), generator=g) + 0.3).to(dtype).to(device)


run = kernels()(geglu)
truth = in_fp64(eager)


# --- forward ------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, device):
    x, bias = make(shape, device=device)
    for b in (bias, None):
        y = run(x, b)
        assert y.shape == (*shape[:-1], shape[-1] // 2)
        assert error(y, truth(x, b)) < BOUNDS[torch.float32]


def test_the_shapes_take_every_way():
    sizes = [(torch.Size(p.values[0][:-1]).numel(), p.values[0][-1] // 2) for p in SHAPES]
    forwards = [(forward_config(rows, D, vector_width(4, D), 2 * D), rows, D) for rows, D in sizes]
    backwards = [
        (backward_config(rows, D, vector_width(4, D), 2 * D, NUM_SMS, column_sums=True), rows, D)
        for rows, D in sizes
    ]
    for configs in (forwards, backwards):
        assert {config.is_even(rows, D) for config, rows, D in configs} == {True, False}
    assert {config.num_warps for config, _, _ in forwards} == {1, 2, 4}
    assert max(config.tiles for config, _, _ in backwards) > 4
    assert max(config.groups for config, _, _ in backwards) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WAYS)
def test_every_dtype(shape, dtype, device):
    x, bias = make(shape, dtype, device)
    for b in (bias, bias.float(), None):
        y = run(x, b)
        assert y.dtype is dtype
        assert error(y, truth(x, b)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 30.0, -3.0], ids=["centred", "large", "closed-gates"])
def test_no_less_exact_than_eager(dtype, mean, device):
    skip_cut_off(dtype, device)
    x, bias = make((9, 330), dtype, device, mean)
    expected = truth(x, bias)
    slack = (0.5 if dtype is torch.float32 else 0.1) * torch.finfo(dtype).eps
    assert error(run(x, bias), expected) <= error(eager(x, bias), expected) + slack


def test_every_half_precision_gate(device):
    """In 16 bits the normal distribution is approximated: one rounding, for closed gates too."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    gate = every[every.isfinite() & (every.abs() <= 16)].view(2, -1).to(device)
    x = torch.cat((torch.full_like(gate, 3.0), gate), -1)
    spacing = torch.finfo(torch.float16)
    expected = truth(x)
    assert (
        (run(x) - expected).abs()
        <= 0.53 * (expected.abs() * spacing.eps + spacing.smallest_normal * spacing.eps)
    ).all()
    dy = torch.ones_like(gate)
    (dx,), (want,) = grads_of(geglu, (x,), dy), grads_of(truth, (x,), dy, torch.float64)
    assert (
        (dx - want).abs() <= 0.53 * want.abs() * spacing.eps + 2e-6
    ).all()  # P + zP' is a difference near its zero


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WAYS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_not_finite_values_are_as_eagers(shape, dtype, device):
    x = make(shape, dtype, device)[0]
    D = shape[-1] // 2
    large = min(torch.finfo(dtype).max, 1e30)
    for row, value in enumerate((float("inf"), float("-inf"), float("nan"), large, -large)):
        x[row, 1] = x[row, D + 2] = value
        x[row, 3] = x[row, D + 3] = value
    y, expected = run(x), eager(x)
    assert torch.equal(y.isnan(), expected.isnan())
    # Of a nearly closed gate, 1 + erf leaves fp32 few digits in eager too; 1e30 shows them.
    bounds = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    torch.testing.assert_close(y.nan_to_num(7.0), expected.nan_to_num(7.0), **bounds)


@pytest.mark.parametrize("shape", WAYS)
def test_nothing_else_is_read_or_written(shape, device):
    """Between the rows of a wider tensor lies what must neither be read into the result nor be changed."""
    buffer = torch.full((shape[0] + 1, shape[1] + 8), float("nan"), device=device)
    buffer[:-1, : shape[1]] = make(shape, device=device)[0]
    before = buffer.clone()
    x = buffer[:-1, : shape[1]]
    assert run(x).isfinite().all()
    bias = torch.zeros(shape[1], device=device)
    with kernels():
        grads = torch.ops.sdfastgn.geglu_backward(gradient(shape, device=device), x, bias, x.dtype, x.dtype)
    assert all(t.isfinite().all() for t in grads)
    assert torch.equal(buffer.nan_to_num(7.0), before.nan_to_num(7.0))


# --- backward -----------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["dispatcher", "direct"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, direct, device):
    leaves, dy = make(shape, device=device), gradient(shape, device=device)
    ours = grads_of(geglu, leaves, dy, direct=direct)
    for got, want in zip(ours, grads_of(truth, leaves, dy, torch.float64), strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() <= 2e-6 * want.norm() + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 30.0, -3.0], ids=["centred", "large", "closed-gates"])
def test_gradients_no_less_exact_than_eager(dtype, mean, device):
    skip_cut_off(dtype, device)
    leaves, dy = make((9, 330), dtype, device, mean), gradient((9, 330), dtype, device)
    expected, stock = grads_of(eager, leaves, dy, torch.float64), grads_of(eager, leaves, dy)
    for ours, theirs, want in zip(grads_of(geglu, leaves, dy), stock, expected, strict=True):
        assert ours.dtype is dtype
        slack = 0.5 * torch.finfo(dtype).eps * want.norm()
        assert (ours - want).norm() <= (theirs - want).norm() * 1.05 + slack


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_a_bias_that_is_not_finite_stays_in_its_column(device):
    """Rows of a tile that are not there must not make 0 * inf."""
    x, bias = make((9, 330), device=device)
    bias[[3, 165 + 7]] = float("inf")
    dy = gradient((9, 330), device=device).abs()
    x[:, 7] = x[:, 165 + 3] = 2.0  # so that the products are infinite, not NaN
    dbias = grads_of(geglu, (x, bias), dy)[1]
    want = grads_of(truth, (x, bias), dy, torch.float64)[1]
    assert want.isinf().sum() == 2  # the values' gradient and the gates' of the two columns
    torch.testing.assert_close(dbias, want.float(), equal_nan=True)


# --- GPU ----------------------------------------------------------------------

GPU_SHAPES = [
    pytest.param(s, id="x".join(map(str, s)))
    for s in [(8192, 2560), (2048, 5120), (2, 1024, 10240), (4096, 2002), (10**6 + 1, 20), (3, 10**6 + 6)]
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_real_shapes_on_the_gpu(shape, dtype):
    x, bias = make(shape, dtype, "cuda")
    assert error(run(x, bias), truth(x, bias)) < BOUNDS[dtype]
    # Of mean 0: sums over a million gradients of one sign would not fit into fp16.
    dy = torch.randn(truth(x).shape, device="cuda").to(dtype)
    ours = grads_of(geglu, (x, bias), dy)
    for got, want in zip(ours, grads_of(truth, (x, bias), dy, torch.float64), strict=True):
        assert error(got, want) < 4 * BOUNDS[dtype]


@pytest.mark.gpu
@pytest.mark.gigabytes
@pytest.mark.parametrize("shape", [(1, 2**31 + 16), (2**20 + 1, 2**11)], ids=["long-row", "many-rows"])
def test_more_than_two_to_the_31_elements(shape):
    x = torch.full(shape, 0.5, dtype=torch.float16, device="cuda")
    x[-1, -3:] = 2.0
    y = run(x)
    assert torch.equal(y[-1, -4:], eager(x[-1:].unflatten(-1, (2, -1))[..., -4:].flatten(-2))[0])
    assert (y[0, :4] == y[0, 0]).all()
