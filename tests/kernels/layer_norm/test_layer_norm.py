"""The kernels of ``sdfastgn.layer_norm`` and ``sdfastgn.add_layer_norm`` against fp64."""

import pytest
import torch
import torch.nn.functional as F

import sdfastgn
from sdfastgn.kernels.common.sizes import vector_width
from sdfastgn.kernels.layer_norm import op as layer_norm
from sdfastgn.kernels.layer_norm.config import ChunksConfig, backward_config, forward_config
from tests.kernels.gradients import grads_of
from tests.kernels.ops import true_add_layer_norm, true_layer_norm
from tests.kernels.samples import (
    BOUNDS,
    DTYPES,
    error,
    in_fp64,
    interpreted,
    kernels,
    skip_cut_off,
)

NUM_SMS = 4
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.multiprocessors(NUM_SMS)]

SHAPES = [
    pytest.param((7, 10), id="short-rows"),
    pytest.param((600, 10), id="many-short-rows"),
    pytest.param((5, 33), id="odd"),
    pytest.param((2, 3, 320), id="rank3-320"),
    pytest.param((66, 320), id="a-warp-a-row"),
    pytest.param((3, 1280), id="warps-share-a-row"),
    pytest.param((2, 2, 3, 100), id="rank4"),
    pytest.param((40,), id="rank1"),
    pytest.param((3, 1), id="one-column"),
    pytest.param((3, 17001), id="chunks-odd"),
    pytest.param((2, 20000), id="chunks"),
]
WAYS = [pytest.param((6, 320), id="rows"), pytest.param((2, 17000), id="chunks")]


def make(shape, dtype=torch.float32, device="cpu", mean=3.0, seed=0):
    """x, residual, weight, bias, add_bias."""
    g = torch.Generator().manual_seed(seed)
    full = [torch.randn(shape, generator=g) * 1.5 + mean for _ in range(2)]
    columns = [torch.randn(shape[-1], generator=g) for _ in range(3)]
    return [t.to(dtype).to(device) for t in (*full, *columns)]


run = kernels()(sdfastgn.layer_norm)
run_add = kernels()(sdfastgn.add_layer_norm)
truth = in_fp64(true_layer_norm)


def add(x, residual, weight, bias, add_bias, total_bias=None):
    return sdfastgn.add_layer_norm(x, residual, weight, bias, add_bias=add_bias, total_bias=total_bias)


# --- forward ------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, device):
    x, residual, weight, bias, add_bias = make(shape, device=device)
    y = run(x, weight, bias)
    assert y.shape == x.shape
    assert (y.double() - truth(x, weight, bias)).abs().max() < 1e-5
    y, total = run_add(x, residual, weight, bias, add_bias=add_bias)
    assert torch.equal(total, x + residual + add_bias)
    assert (y.double() - truth(total, weight, bias)).abs().max() < 1e-5


def test_the_shapes_take_both_ways():
    def ways(params):
        shapes = [torch.Size(p.values[0]) for p in params]
        return {type(forward_config(s[:-1].numel(), s[-1], 4, 1, NUM_SMS)).__name__ for s in shapes}

    assert ways(SHAPES) == ways(WAYS) == {"RowsConfig", "ChunksConfig"}
    assert forward_config(3, 1280, 4, 4, NUM_SMS).wide
    assert not forward_config(600, 320, 4, 4, NUM_SMS).wide
    gathered, few = (forward_config(rows, 10, 4, vector_width(4, 10), NUM_SMS) for rows in (600, 7))
    assert gathered.lanes > few.lanes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WAYS)
def test_every_dtype(shape, dtype, device):
    x, residual, weight, bias, add_bias = make(shape, dtype, device)
    assert run(x, weight, bias).dtype is dtype
    assert error(run(x, weight, bias), truth(x, weight, bias)) < BOUNDS[dtype]
    y, total = run_add(x, residual, weight.float(), None, add_bias=add_bias.float())
    assert total.dtype is y.dtype is dtype
    assert error(total, x.double() + residual.double() + add_bias.double()) < BOUNDS[dtype]
    assert error(y, truth(total, weight)) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("dtype", "mean"),
    [
        pytest.param(torch.float32, 1500.0, id="float32-mean-1000-std"),
        pytest.param(torch.float32, 0.0, id="float32-centred"),
        pytest.param(torch.float16, 45.0, id="float16-mean-30-std"),
    ],
)
@pytest.mark.parametrize("shape", WAYS)
def test_no_less_exact_than_eager(shape, dtype, mean, device):
    x, _, weight, bias, _ = make(shape, dtype, device, mean)
    expected = truth(x, weight, bias)
    eager = F.layer_norm(x, shape[-1:], weight, bias)
    # A fraction of the last rounding: two exact results may round a few elements differently.
    slack = (0.5 if dtype is torch.float32 else 0.1) * torch.finfo(dtype).eps
    assert error(run(x, weight, bias), expected) <= error(eager, expected) + slack


@pytest.mark.parametrize("shape", WAYS)
def test_far_means_and_outliers(shape, device):
    """The pivot of the sums is the first element: its value must not matter."""
    x, _, weight, bias, _ = make(shape, device=device, mean=1500.0)
    assert error(run(x, weight, bias), truth(x, weight, bias)) < 2e-6
    x[:, 0] = -1e6
    assert error(run(x, weight, bias), truth(x, weight, bias)) < 2e-5


@pytest.mark.parametrize("shape", WAYS)
def test_constant_rows_are_exact(shape, device):
    _, _, weight, bias, _ = make(shape, device=device)
    x = torch.full(shape, 1234.567, device=device)
    assert torch.equal(run(x, weight, bias), bias.expand(shape))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("column", [0, 5], ids=["first-column", "column-5"])
@pytest.mark.parametrize("shape", WAYS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
def test_not_finite_rows_are_as_eagers(shape, column, value, device):
    x = make(shape, device=device)[0]
    x[1, column] = value
    y = run(x)
    assert torch.equal(y.isnan(), F.layer_norm(x, shape[-1:]).isnan())
    assert error(y[0], truth(x[0])) < 2e-6


@pytest.mark.parametrize("eps", [1e-5, 0.1, 0, 1])
@pytest.mark.parametrize("shape", WAYS)
def test_eps(shape, eps, device):
    x = make(shape, device=device)[0]
    assert error(run(x, eps=eps), truth(x, eps=eps)) < 2e-6


@pytest.mark.parametrize("shape", WAYS)
def test_nothing_else_is_written(shape, device):
    """Between the rows of a wider tensor lies what must neither be read into the result nor be changed."""
    buffer = torch.full((shape[0], shape[1] + 8), float("nan"), device=device)
    buffer[:, : shape[1]] = make(shape, device=device)[0]
    before = buffer.clone()
    assert run(buffer[:, : shape[1]]).isfinite().all()
    assert torch.equal(buffer.nan_to_num(7.0), before.nan_to_num(7.0))


# --- backward -----------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["dispatcher", "direct"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, direct, device):
    leaves = make(shape, device=device)
    dys = make(shape, device=device, seed=1)[:2]

    def call(f):
        return lambda x, r, w, b, a: f(x, r, w, b, 0.1, add_bias=a)

    ours = grads_of(call(sdfastgn.add_layer_norm), leaves, dys, torch.float32, direct=direct)
    expected = grads_of(call(true_add_layer_norm), leaves, dys, torch.float64)
    for got, want in zip(ours, expected, strict=True):
        assert got.shape == want.shape
        assert (got - want).norm() <= 2e-6 * want.norm() + 1e-6


def test_the_shapes_take_both_ways_back():
    configs = [
        backward_config(s[:-1].numel(), s[-1], 1, NUM_SMS, column_sums=True)
        for s in (torch.Size(p.values[0]) for p in SHAPES)
    ]
    rows = [c for c in configs if not isinstance(c, ChunksConfig)]
    assert len(rows) < len(configs)
    assert {c.wide for c in rows} == {True, False}
    assert max(c.programs for c in rows) > 1


@pytest.mark.parametrize(
    ("dtype", "mean"),
    [
        pytest.param(torch.float32, 1500.0, id="float32-mean-1000-std"),
        pytest.param(torch.float32, 3.0, id="float32"),
        pytest.param(torch.float16, 3.0, id="float16"),
        pytest.param(torch.bfloat16, 3.0, id="bfloat16"),
    ],
)
@pytest.mark.parametrize("shape", WAYS)
def test_gradients_no_less_exact_than_eager(shape, dtype, mean, device):
    skip_cut_off(dtype, device)
    x, _, weight, bias, _ = make(shape, dtype, device, mean)
    dys = make(shape, dtype, device, seed=1)[:1]
    operands = (x, weight, bias)
    expected = grads_of(true_layer_norm, operands, dys, torch.float64)
    stock = grads_of(true_layer_norm, operands, dys, dtype)
    for ours, theirs, want in zip(
        grads_of(sdfastgn.layer_norm, operands, dys, dtype), stock, expected, strict=True
    ):
        slack = 0.5 * torch.finfo(dtype).eps * want.norm()
        assert (ours - want).norm() <= (theirs - want).norm() * 1.05 + slack


@pytest.mark.parametrize("needs", ["x", "weight", "bias", "weight bias", "x add_bias"])
@pytest.mark.parametrize("shape", WAYS)
def test_only_what_is_needed(shape, needs, device):
    names = ("x", "residual", "weight", "bias", "add_bias")
    operands = dict(zip(names, make(shape, device=device), strict=True))

    def gradients(f, dtype):
        leaves = {n: t.to(dtype).detach().requires_grad_(n in needs.split()) for n, t in operands.items()}
        with kernels():
            y, total = f(**leaves)
            (y.square().sum() + (total.sum() if total.requires_grad else 0)).backward()
        return {name: t.grad for name, t in leaves.items() if t.grad is not None}

    found = gradients(sdfastgn.add_layer_norm, torch.float32)
    expected = gradients(true_add_layer_norm, torch.float64)
    assert found.keys() == expected.keys() == set(needs.split())
    assert all(error(found[name], expected[name]) < 1e-4 for name in found)


@pytest.mark.parametrize("shape", [*WAYS, pytest.param((40,), id="rank1")])
def test_gradients_of_one_result(shape, device):
    leaves = make(shape, device=device)
    dy, dtotal = make(shape, device=device, seed=1)[:2]
    dx, dr, dw, db, da = grads_of(add, leaves, (None, dtotal), torch.float32)
    assert torch.equal(dx, dtotal)
    assert torch.equal(dr, dtotal)
    assert dw is None
    assert db is None
    assert error(da, dtotal.double().sum_to_size(shape[-1:])) < 2e-6
    dx, *_ = grads_of(add, leaves, (dy, None), torch.float32)
    u = (leaves[0] + leaves[1] + leaves[4]).double().requires_grad_()
    (want,) = torch.autograd.grad(truth(u, leaves[2], leaves[3]), u, dy.double())
    assert error(dx, want) < 2e-6


@interpreted
@pytest.mark.parametrize("direct", [False, True], ids=["dispatcher", "direct"])
def test_rows_without_elements(direct):
    z = torch.randn(2, 0, requires_grad=True)
    with kernels(direct=direct):
        total = sdfastgn.add_layer_norm(z, z)[1]
        assert torch.autograd.grad(total.sum(), z)[0].shape == (2, 0)


# --- the bias that is added to the sum, but not to the norm --------------------


@pytest.fixture
def in_kernels(monkeypatch):
    """What is not done in the kernels raises."""

    def absent(*_):
        raise AssertionError("plain PyTorch made the sum")

    monkeypatch.setattr(layer_norm, "reference_add", absent)


def run_total(shape, dtype=torch.float32, device="cpu", *, has_add_bias=True, param_dtype=None):
    """Operands of ``add``, the bias of the total, and what the kernels make of them."""
    *operands, add_bias = make(shape, dtype, device)
    operands.append(add_bias if has_add_bias else None)
    total_bias = (make(shape, seed=2)[2] * 5 + 30).to(dtype).to(device, param_dtype or dtype)
    with kernels(direct=True), torch.no_grad():
        return operands, total_bias, add(*operands, total_bias)


@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("has_add_bias", [True, False], ids=["add-bias", "no-add-bias"])
@pytest.mark.parametrize("shape", [*WAYS, SHAPES[1], SHAPES[2], SHAPES[5], SHAPES[9]])
def test_the_norm_does_not_see_the_bias_of_the_total(shape, has_add_bias, device):
    operands, total_bias, (y, total) = run_total(shape, device=device, has_add_bias=has_add_bias)
    with kernels(direct=True), torch.no_grad():
        expected, plain = add(*operands)
    # Two kernels: a GPU's compiler may fuse other multiplications and additions.
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(total, plain + total_bias)
    assert total.is_contiguous()


@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("param_dtype", [None, torch.float32], ids=["own-dtype", "fp32-params"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WAYS)
def test_the_total_is_rounded_once(shape, dtype, param_dtype, device):
    operands, total_bias, (y, total) = run_total(shape, dtype, device, param_dtype=param_dtype)
    x, residual, weight, bias, add_bias = operands
    assert total.dtype is y.dtype is dtype
    wide = x.float() + residual.float() + add_bias.float()
    if dtype is torch.bfloat16 and device == "cpu":  # the interpreter truncates to bf16
        assert error(total, wide.double() + total_bias.double()) < BOUNDS[dtype]
        return
    assert torch.equal(total, (wide + total_bias.float()).to(dtype))
    rounded = wide.to(dtype)
    assert dtype is torch.float32 or not torch.equal(total, (rounded.float() + total_bias.float()).to(dtype))
    assert error(y, truth(rounded, weight, bias)) < BOUNDS[dtype]


# --- GPU ----------------------------------------------------------------------

GPU_SHAPES = [
    pytest.param(s, id="x".join(map(str, s)))
    for s in [
        (8192, 320), (2048, 640), (2, 1024, 1280), (512, 768), (4096, 1000), (4096, 1001), (33, 16384),
        (64, 40000), (10, 10**6 + 3),
        (10**6 + 1, 10), (3 * 10**5, 100),
    ]
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_real_shapes_on_the_gpu(shape, dtype):
    x, residual, weight, bias, add_bias = make(shape, dtype, "cuda")
    assert error(run(x, weight, bias), truth(x, weight, bias)) < BOUNDS[dtype]
    y, total = run_add(x, residual, weight, bias, add_bias=add_bias)
    assert error(y, truth(total, weight, bias)) < BOUNDS[dtype]
    # Of mean 0: sums over a million gradients of one sign would not fit into fp16.
    dys = (torch.randn(shape, device="cuda").to(dtype),)
    ours = grads_of(sdfastgn.layer_norm, (x, weight, bias), dys, dtype)
    for got, want in zip(ours, grads_of(truth, (x, weight, bias), dys, torch.float64), strict=True):
        assert error(got, want) < 4 * BOUNDS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(10, 10**7), (10**7, 10)], ids=["columns", "rows"])
def test_ten_million_columns_or_rows(shape):
    x, _, weight, bias, _ = (t.requires_grad_() for t in make(shape, torch.float16, "cuda"))
    y = sdfastgn.layer_norm(x, weight, bias)
    expected = F.layer_norm(x.detach().float(), shape[-1:], weight.detach().float(), bias.detach().float())
    torch.testing.assert_close(y.detach(), expected.half(), atol=4e-3, rtol=2e-3)
    # A power of 2, so that each sum is exact, and small enough for fp16.
    dx, dbias = torch.autograd.grad(y, (x, bias), torch.full_like(y, 2**-10))
    assert dx.isfinite().all()
    torch.testing.assert_close(dbias, torch.full_like(dbias, shape[0] / 2**10))
