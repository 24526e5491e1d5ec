"""The kernel of ``rotate`` against fp64."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.rotate.op import rotate
from tests.kernels.samples import BOUNDS, DTYPES, HALVES, PLACES, error, kernels

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "without_gradients")]

SHAPES = [(2, 5, 3, 16), (1, 7, 2, 10), (1, 1, 1, 2), (2, 3, 1, 2048), (1, 33, 4, 130), (1, 1, 1, 16386)]


def drawn(shape, dtype=torch.float32, device="cpu", columns=1, table=None):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=g) + 1).to(dtype).to(device)
    size = table or (1, shape[1], 1)
    tables = [torch.randn((*size, shape[-1] // columns), generator=g).to(device) for _ in range(2)]
    return x, *tables


def normed(x, weight, eps):
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight.double()


def truth(x, cos, sin, weight=None, eps=0.0, halves=False):
    x = x.double() if weight is None else normed(x, weight, eps)
    if cos is None:
        return x
    cos, sin = cos.double(), sin.double()
    D, times = x.shape[-1], x.shape[-1] // cos.shape[-1]
    if halves:
        cos, sin = (t.repeat(1, 1, 1, times) for t in (cos, sin))
        return x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin
    cos, sin = (t.repeat_interleave(times, -1).expand(x.shape) for t in (cos, sin))
    y = torch.empty_like(x)
    y[..., ::2] = x[..., ::2] * cos[..., ::2] - x[..., 1::2] * sin[..., ::2]
    y[..., 1::2] = x[..., 1::2] * cos[..., 1::2] + x[..., ::2] * sin[..., 1::2]
    return y


def truth_of_norm(x, cos, sin, weight, eps, halves, bias=None, layer=False):
    """The norm of each row, and then its rotation."""
    if layer:
        x = F.layer_norm(x.double(), x.shape[-1:], None if weight is None else weight.double(), None, eps)
    else:
        x = x.double() if weight is None else normed(x, weight, eps)
    x = x if bias is None else x + bias.double()
    return truth(x, cos, sin, None, 0.0, halves)


def check(x, cos, sin, weight=None, eps=0.0, out=None, roundings=1, halves=False, **norm):
    with kernels(direct=True):
        y = rotate(x, cos, sin, weight, eps, out, halves, **norm)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, out is None)
    assert out is None or y is out
    expected = truth_of_norm(x, cos, sin, weight, eps, halves, **norm)
    assert error(y, expected) < roundings * BOUNDS[x.dtype]
    return y


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, columns, device):
    check(*drawn(shape, device=device, columns=columns))


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_of_the_halves_of_a_row(shape, columns, device):
    x, cos, sin = drawn(shape, device=device, columns=columns)
    check(x, cos, sin, halves=True)
    check(x, cos, sin, 1 + x[0, 0, 0] / 2, 1e-5, halves=True)
    assert error(rotate(x, cos, sin, halves=True), truth(x, cos, sin, halves=True)) < BOUNDS[x.dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_of_a_part_of_a_larger_tensor(dtype, device):
    x, cos, sin = drawn((2, 5, 3, 16), dtype, device)
    packed = torch.cat((x, x + 100), -1)
    check(packed[..., :16], cos, sin[..., ::2].repeat(1, 1, 1, 2), halves=True)
    out = torch.zeros(2, 9, 3, 16, dtype=dtype, device=device)
    check(packed[..., :16], cos, sin, x[0, 0, 0], 1e-5, out[:, 2:7], 3, halves=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype, device):
    x, cos, sin = drawn((2, 5, 3, 16), dtype, device)
    check(x, cos, sin)
    check(x, cos.to(dtype), sin)


@pytest.mark.parametrize("table", [(2, 5, 3), (1, 1, 1), (2, 1, 3), (1, 1, 3)])
def test_tables_of_every_size(table, device):
    check(*drawn((2, 5, 3, 16), device=device, table=table))


@pytest.mark.parametrize("place", PLACES)
def test_every_layout(place, device):
    x, cos, sin = drawn((2, 5, 3, 16), device=device)
    check(x.transpose(1, 2).contiguous().transpose(1, 2), place(cos.expand(x.shape)), place(sin))
    check(place(x), cos, sin)


def test_parts_of_larger_tensors(device):
    """As models cut heads, and every second column of a table."""
    _, cos, sin = drawn((2, 5, 3, 16), device=device)
    packed = torch.randn(2, 5, 3 * 48, device=device)
    x = packed[..., 48:96].view(2, 5, 3, 16)
    check(x, cos[..., ::2], sin[..., 1::2])
    pairs = torch.randn(1, 5, 1, 8, 2, device=device)
    check(x, pairs[..., 0], pairs[..., 1])


# ---- with a norm


@pytest.mark.parametrize("shape", [*SHAPES[:5], (2, 3, 2, 63), (1, 2, 1, 1), (1, 1, 1, 8193)])
def test_norm_of_every_shape(shape, device):
    """Odd rows cannot be rotated. The longest ones have no kernel."""
    if shape[-1] % 2:
        x, tables = drawn((*shape[:3], 2 * shape[-1]), device=device)[0][..., ::2], (None, None)
    else:
        x, *tables = drawn(shape, device=device)
    weight = torch.randn(shape[-1], device=device)
    for cos, sin in (tables, (None, None)):
        check(x, cos, sin, weight, 0.3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_in_every_dtype(dtype, device):
    x, cos, sin = drawn((2, 5, 3, 16), dtype, device)
    weight = torch.randn(16, device=device)
    for each in (weight, weight.to(dtype)):
        check(x, None, None, each, 1e-6)
        check(x, cos, sin, each, 1e-6, roundings=3)


@pytest.mark.parametrize("dtype", HALVES)
def test_norm_is_rounded_before_the_rotation(dtype, device):
    """As in models that compute one after the other."""
    x = torch.ones(1, 1, 1, 16, dtype=dtype, device=device)
    weight, table = torch.ones(16, device=device), torch.full((1, 1, 1, 16), 1024.0, device=device)
    weight[::2] += 2**-12
    with kernels(direct=True):
        assert (rotate(x, table, table, weight)[..., ::2] == 0).all()


def test_norm_adds_eps_to_small_and_zero_rows(device):
    x, cos, sin = drawn((2, 5, 3, 16), device=device)
    x[0] *= 1e-4
    x[1, 2] = 0
    check(x, cos, sin, torch.randn(16, device=device), 1e-6)


@pytest.mark.parametrize(("heads", "together"), [(3, 3), (1, 2)])
def test_rows_that_share_a_row_of_the_tables_follow_each_other(heads, together, launches):
    x, cos, sin = drawn((2, 5, heads, 16))
    with kernels(direct=True):
        rotate(x, cos, sin)
    ((_, launch, tensors),) = launches
    n = dict(zip(launch.kernel.arg_names[len(tensors) :], launch.numbers, strict=False))
    rows = [(r // n["C"] // n["B"], r // n["C"] % n["B"], r % n["C"]) for r in range(n["rows"])]
    places = [sum(i * n[f"cos_{axis}"] for i, axis in zip(row, "abc", strict=True)) for row in rows]
    assert places[:together] == [0] * together
    assert places[together] > 0


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (1, 7, 2, 10), (1, 33, 4, 130), (1, 1, 1, 8194)])
def test_layer_norm(shape, halves, device):
    x, cos, sin = drawn(shape, device=device)
    weight, bias = (torch.randn(shape[-1], device=device) for _ in range(2))
    for parameters in ((None, None), (weight, None), (None, bias), (weight, bias)):
        for tables in ((cos, sin), (None, None)):
            check(x, *tables, parameters[0], 1e-5, halves=halves, bias=parameters[1], layer=True)
        plain = rotate(x, cos, sin, parameters[0], 1e-5, None, halves, bias=parameters[1], layer=True)
        expected = truth_of_norm(x, cos, sin, parameters[0], 1e-5, halves, parameters[1], True)
        assert error(plain, expected) < BOUNDS[x.dtype]
    check(x, cos, sin, weight, 1e-5, halves=halves, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_a_mean_far_from_zero(dtype, device):
    x, cos, sin = drawn((2, 5, 3, 16), dtype, device)
    x = x + 100
    for halves in (False, True):
        check(x, cos, sin, None, 1e-6, roundings=3, halves=halves, layer=True)


# ---- into a part of a larger tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [16, 10, 7])
def test_into_a_slice_of_tokens(D, dtype, device):
    whole = torch.full((2, 11, 3, D), 7.0, dtype=dtype, device=device)
    x, cos, sin = drawn((2, 5, 3, 2 * (D // 2)), dtype, device)
    x = torch.randn(2, 5, 3 * D, device=device).to(dtype).view(2, 5, 3, D) if D % 2 else x
    weight = torch.randn(D, device=device)
    calls = [(None, None), (None, None, weight, 1e-6)]
    calls += [] if D % 2 else [(cos, sin), (cos, sin, weight, 1e-6)]
    for call in calls:
        y = check(x, *call, out=whole[:, 4:9], roundings=3)
        assert torch.equal(whole[:, 4:9], y)
        assert (whole[:, :4] == 7).all()
        assert (whole[:, 9:] == 7).all()


@pytest.mark.parametrize("place", [lambda t: t.transpose(1, 2), lambda t: t.flip(1)[:, ::2], lambda t: t[1:]])
def test_into_every_layout_with_whole_rows(place, device):
    x, cos, sin = drawn((2, 5, 3, 16), device=device)
    wide = torch.empty(3, 9, 5, 20, device=device)
    out = place(wide)[:2, :5, :3, 2:18]
    check(x, cos, sin, torch.randn(16, device=device), 1e-6, out=out)


def test_a_copy_without_norm_and_tables(device):
    x, *_ = drawn((2, 5, 3, 15 + 1), device=device)
    for each in (x, x[..., 1:], x.transpose(1, 2)):
        assert torch.equal(check(each, None, None), each)
    assert rotate(x, None, None).data_ptr() != x.data_ptr()


def test_one_table_with_both_numbers_of_each_pair(device):
    for shape in ((2, 5, 3, 16), (1, 7, 2, 10)):
        x, cos, sin = drawn(shape, device=device, columns=2)
        for weight in (None, torch.randn(shape[-1], device=device)):
            turns = torch.stack((cos, sin), -1).flatten(-2)
            with kernels(direct=True):
                found = rotate(x, turns, None, weight, 0.1)
            assert error(found, truth(x, cos, sin, weight, 0.1)) < BOUNDS[x.dtype]
            assert error(rotate(x, turns, None, weight, 0.1), found) < BOUNDS[x.dtype]


def test_not_finite_values_stay_in_their_pair(device):
    x, cos, sin = drawn((1, 5, 3, 10), device=device)
    x[0, 2, 1, 4] = float("nan")
    with kernels(direct=True):
        y = rotate(x, cos, sin)
    assert y[0, 2, 1, 4:6].isnan().all()
    assert y.isnan().sum() == 2


def test_without_elements(device):
    x, cos, sin = drawn((2, 0, 3, 16), device=device)
    with kernels(direct=True):
        assert rotate(x, cos, sin).shape == x.shape


def test_gradients_run_in_pytorch():
    x, cos, sin = (t.double().requires_grad_() for t in drawn((1, 2, 1, 4)))
    with torch.enable_grad():
        assert torch.autograd.gradcheck(rotate, (x, cos, sin))


X = torch.zeros(2, 3, 1, 8)
WRONG = [
    ((X[0], X, X), ValueError, r"x must be \(A, B, C, D\)"),
    ((X[..., :7], X, X), ValueError, "with even D"),
    ((X, X[..., :3], X), ValueError, r"cos must be .* got \(2, 3, 1, 3\)"),
    ((X, X, X[:, :2]), ValueError, r"sin must be .* got \(2, 2, 1, 8\)"),
    ((X, X[0], X), ValueError, r"cos must be .* got \(3, 1, 8\)"),
    ((X, X, X[..., :4]), ValueError, "cos and sin must have the same last size, got 8 and 4"),
    ((X, 1.0, X), TypeError, "cos must be a torch.Tensor, got float"),
    ((X.int(), X, X), TypeError, "x must be a floating"),
    ((X, X[..., :4], None), ValueError, "cos must have 8 columns without sin, got 4"),
    ((X, None, X), TypeError, "cos must be a torch.Tensor, got NoneType"),
    ((X, X, X, X), ValueError, r"weight must have shape \(8,\), got \(2, 3, 1, 8\)"),
    ((X, X, X, X[0, 0, 0], "1"), TypeError, "eps must be"),
    ((X, X, X, None, 0.0, X[:1]), ValueError, r"out must have shape \(2, 3, 1, 8\), got \(1, 3, 1, 8\)"),
    ((X, X, X, None, 0.0, X.half()), TypeError, "out must have the dtype torch.float32"),
    ((X, X, X, None, 0.0, X.repeat(1, 1, 1, 2)[..., ::2]), ValueError, "rows of out must be contiguous"),
    ((X, X, None, None, 0.0, None, True), ValueError, "with halves, sin must be a tensor, got None"),
    ((X, X, X, None, 0.0, None, 1), TypeError, "halves must be"),
    ((X, X, X, None, 0.0, None, False, X[0, 0, 0]), ValueError, "with a bias, there must be a weight"),
    ((X, X, X, None, 0.0, None, False, X, True), ValueError, r"bias must have shape \(8,\)"),
    ((X, X, X, None, 0.0, None, False, None, 1), TypeError, "layer must be"),
]


@pytest.mark.parametrize(("args", "kind", "text"), WRONG)
def test_wrong_arguments(args, kind, text):
    for direct in (False, True):
        with kernels(direct=direct), pytest.raises(kind, match=f"rotate: .*{text}"):
            rotate(*args)
