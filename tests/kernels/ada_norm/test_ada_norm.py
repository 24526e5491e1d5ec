"""The kernel of ``ada_norm`` against fp64."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.ada_norm.op import Norm, ada_norm, ada_norm_in_e4m3
from sdfastgn.kernels.common.e4m3 import E4M3
from tests.kernels.samples import BOUNDS, DTYPES, error, kernels, skip_cut_off

pytestmark = [pytest.mark.usefixtures("poisoned_memory", "without_gradients"), pytest.mark.multiprocessors(2)]

# (B, S, D): rows of one warp, of several lanes, of several warps, odd ones, and one that has no kernel.
SHAPES = [(2, 3, 64), (1, 5, 333), (2, 70, 48), (3, 1, 1), (1, 2, 3072), (2, 2, 2305), (1, 2, 16640)]


def drawn(shape, dtype=torch.float32, device="cpu", mean=0.0, seed=0):
    """x, branch, and (gate, factor, offset) for each sample, in a larger tensor as models cut them."""
    B, _, D = shape
    g = torch.Generator().manual_seed(seed)
    x, branch = (torch.randn(shape, generator=g) + mean for _ in range(2))
    modulation = torch.randn((B, 3 * D), generator=g)
    x, branch, modulation = (t.to(dtype).to(device) for t in (x, branch, modulation))
    return x, branch, *(t[:, None] for t in modulation.chunk(3, -1))


def norms(shape, dtype=torch.float32, device="cpu"):
    """A LayerNorm, an RMS norm, and both without parameters."""
    g = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(shape[-1], generator=g).to(dtype).to(device) for _ in range(2))
    return [
        Norm("layer", weight, bias, 1e-5), Norm("layer"), Norm("rms", weight, None, 1e-6), Norm("rms"),
    ]  # fmt: skip


def normalized(x, norm):
    if norm is None:
        return x
    weight, bias = (None if t is None else t.double() for t in norm[1:3])
    if norm.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
    if norm.kind == "rms":
        x = F.rms_norm(x, x.shape[-1:], None, norm.eps)
    return x * (1 if weight is None else weight) + (0 if bias is None else bias)


def truth(x, branch=None, gate=None, branch_norm=None, norm=None, factor=None, offset=None, **flags):
    """In fp64; only the sum is rounded as the kernel rounds it."""
    total, dtype = x.double(), x.dtype
    if branch is not None:
        added = normalized(branch.double(), branch_norm)
        if gate is not None:
            added = added * (torch.tanh(gate.double()) if flags.get("tanh") else gate.double())
        total = (total + added).to(dtype).double()
    y = None
    if norm is not None:
        y = normalized(total, norm)
        y = y if factor is None else y * (factor.double() + bool(flags.get("plus_one")))
        y = y if offset is None else y + offset.double()
    return (None if branch is None else total), y


def check(*args, **flags):
    with kernels(direct=True):
        found = ada_norm(*args, **flags)
    x = args[0]
    for a, b in zip(found, truth(*args, **flags), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype, a.is_contiguous()) == (x.shape, x.dtype, True)
            assert error(a, b) < 2 * BOUNDS[x.dtype]
    return found


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_in_e4m3(shape, kind, device):
    """Each row has the scale of its largest value, and E4M3 has three bits."""
    x, branch, gate, factor, offset = drawn(shape, device=device)
    args = x, branch, gate, None, Norm(kind), factor, offset
    with kernels(direct=True):
        total, rows, scales = ada_norm_in_e4m3(*args, plus_one=True)
        plain, _ = ada_norm(*args, plus_one=True)
    assert torch.equal(total, plain)
    assert (rows.shape, rows.dtype, rows.is_contiguous()) == (shape, E4M3, True)
    assert (scales.shape, scales.dtype, scales.is_contiguous()) == (shape[:2], torch.float32, True)
    _, y = truth(*args, plus_one=True)
    scales = scales.double().unsqueeze(-1)
    torch.testing.assert_close(scales, y.abs().amax(-1, keepdim=True) / 448, rtol=1e-4, atol=1e-9)
    assert ((rows.double() * scales - y).abs() <= 0.063 * y.abs() + scales / 1000).all()


def test_rows_in_e4m3_without_a_sum(device):
    x, _, _, factor, offset = drawn((2, 3, 64), torch.float32, device)
    with kernels(direct=True):
        total, rows, scales = ada_norm_in_e4m3(x, None, None, None, Norm("layer"), factor, offset)
        _, y = ada_norm(x, None, None, None, Norm("layer"), factor, offset)
    assert total is None
    scales = scales.unsqueeze(-1)
    assert ((rows.float() * scales - y).abs() <= 0.063 * y.abs() + scales / 1000).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, device):
    x, branch, gate, factor, offset = drawn(shape, device=device)
    norm = norms(shape, device=device)[0 if shape[-1] > 1 else 2]
    check(x, branch, gate, None, norm, factor, offset, plus_one=True)


@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_norm_and_dtype(i, dtype, device):
    shape = (2, 3, 333)
    x, branch, gate, factor, offset = drawn(shape, dtype, device)
    every = norms(shape, dtype, device)
    check(x, branch, gate, every[2], every[i], factor, offset, tanh=True)
    check(x, None, None, None, every[i], factor, None)
    check(x, branch, gate.float(), every[3], every[i], None, offset.float())
    check(x, branch, None, None, every[i])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_and_bias_of_the_branch(dtype, device):
    shape = (2, 3, 333)
    x, branch, gate, factor, offset = drawn(shape, dtype, device)
    weight, bias = norms(shape, dtype, device)[0][1:3]
    norm = Norm("rms")
    for of_branch in (
        Norm("none", None, bias),
        Norm("none", weight, bias.float()),
        Norm("rms", weight, bias),
    ):
        check(x, branch, gate, of_branch, norm, factor, offset)
        check(x, branch, None, of_branch)
    with kernels(direct=True):
        assert torch.equal(*(ada_norm(x, branch, gate, each)[0] for each in (Norm("none"), None)))


def test_a_sum_alone(device):
    x, branch, gate, *_ = drawn((2, 3, 64), device=device)
    total, y = check(x, branch, gate)
    assert y is None
    assert check(x, branch, gate, norms((64,), device=device)[2], tanh=True)[0] is not None
    with kernels(direct=True):
        left, y = ada_norm(x, branch, gate, None, Norm("rms"), keeps_total=False)
    assert left is None
    assert torch.equal(y, check(x, branch, gate, None, Norm("rms"))[1])
    assert total is not None


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_far_from_zero(kind, dtype, device):
    skip_cut_off(dtype, device)
    x, branch, gate, factor, offset = drawn((1, 4, 320), dtype, device, mean=100.0)
    check(x, None, None, None, Norm(kind), factor, offset)
    total, y = check(x, branch, gate, None, Norm(kind))
    stock = normalized(total.double(), Norm(kind)) if kind == "rms" else F.layer_norm(total, (320,), eps=1e-6)
    expected = normalized(total.double(), Norm(kind))
    assert error(y, expected) <= error(stock, expected) + BOUNDS[dtype]


def test_a_mean_that_fp32_cannot_sum(device):
    x = torch.randn(1, 3, 3072, generator=torch.Generator().manual_seed(0)).to(device) + 3e4
    check(x, None, None, None, Norm("layer"))


@pytest.mark.parametrize("value", [0.0, 3.0, -1e4])
def test_constant_rows(value, device):
    x = torch.full((1, 3, 100), value, device=device)
    torch.testing.assert_close(check_finite(x, Norm("layer")), torch.zeros_like(x), atol=1e-6, rtol=0)
    expected = torch.full_like(x, value).double() / (value**2 + 1e-6) ** 0.5
    torch.testing.assert_close(check_finite(x, Norm("rms")).double(), expected, atol=1e-6, rtol=1e-6)


def check_finite(x, norm):
    with kernels(direct=True):
        y = ada_norm(x, norm=norm)[1]
    assert torch.isfinite(y).all()
    return y


def test_a_row_that_is_not_finite_spoils_no_other(device):
    x, branch, gate, factor, offset = drawn((2, 5, 33), device=device)
    clean = check(x, branch, gate, None, Norm("layer"), factor, offset)[1]
    x = x.clone()
    x[1, 2, 7] = float("nan")
    with kernels(direct=True):
        y = ada_norm(x, branch, gate, None, Norm("layer"), factor, offset)[1]
    assert y[1, 2].isnan().all()
    y[1, 2] = clean[1, 2]
    assert torch.equal(y, clean)


LAYOUTS = {
    "cut along rows": lambda t: torch.cat((t, t + 1), 1)[:, : t.shape[1]],
    "cut along columns": lambda t: torch.cat((t + 1, t), -1)[..., t.shape[-1] :],
    "offset": lambda t: torch.cat((t.flatten().new_ones(1), t.flatten()))[1:].view(t.shape),
    "channels first": lambda t: t.mT.contiguous().mT,
    "every second": lambda t: torch.stack((t, t + 1), -1)[..., 0],
    "rows in turn": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, device):
    shape = (2, 5, 48)
    x, branch, gate, factor, offset = drawn(shape, device=device)
    expected = check(x, branch, gate, None, Norm("layer"), factor, offset)
    moved = [LAYOUTS[layout](t) for t in (x, branch, gate, factor, offset)]
    found = check(*moved[:3], None, Norm("layer"), *moved[3:])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (1, 5), (2, 5)])
def test_modulations_of_samples_and_of_rows(rows, device):
    x, branch, *_ = drawn((2, 5, 48), device=device)
    gate, factor, offset = (torch.randn(*rows, 48, device=device) for _ in range(3))
    check(x, branch, gate, None, Norm("rms"), factor, offset, plus_one=True)
    one = torch.randn(1, 1, 48, device=device)
    check(x, branch, one, None, Norm("layer"), factor, one.expand(2, 5, 48))


def test_large_gates_saturate(device):
    x, branch, *_ = drawn((1, 2, 64), device=device)
    gate = torch.linspace(-200, 200, 64, device=device).view(1, 1, 64)
    check(x, branch, gate, tanh=True)


def test_equal_bits_at_each_run(device):
    args = drawn((2, 3, 333), torch.float16, device)
    first, second = (check(*args[:3], None, Norm("layer"), *args[3:]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_elements(device):
    x = torch.empty(2, 0, 8, device=device)
    with kernels(direct=True):
        total, y = ada_norm(x, x, norm=Norm("rms"))
    assert total.shape == y.shape == x.shape


def test_gradients_run_in_pytorch():
    x, branch, gate, factor, offset = (t.double().requires_grad_() for t in drawn((1, 2, 6)))
    with torch.enable_grad():

        def call(*t):
            return ada_norm(t[0], t[1], t[2], None, Norm("layer"), t[3], t[4], tanh=True)

        assert torch.autograd.gradcheck(
            call, (x, branch, gate.detach().clone().requires_grad_(), factor, offset)
        )


X = torch.zeros(2, 3, 8)
WRONG = [
    ((X[0],), {"norm": Norm("rms")}, ValueError, r"x must be \(B, S, D\), got shape \(3, 8\)"),
    ((X,), {}, ValueError, "there is nothing to compute without a branch and without a norm"),
    ((X,), {"gate": X, "norm": Norm("rms")}, ValueError, "gate and branch_norm need a branch"),
    ((X, X), {"factor": X}, ValueError, "factor, offset and keeps_total=False need a norm"),
    ((X, X, X[..., :4]), {}, ValueError, r"gate must be .* got \(2, 3, 4\)"),
    ((X, X, X[:, 0]), {}, ValueError, r"gate must be .* got \(2, 8\)"),
    ((X, X.half()), {}, TypeError, "branch must have the dtype torch.float32, got torch.float16"),
    ((X, X[:1]), {}, ValueError, r"branch must have shape \(2, 3, 8\), got \(1, 3, 8\)"),
    ((X,), {"norm": Norm("group")}, ValueError, "the kind of a norm must be one of .*, got 'group'"),
    ((X,), {"norm": "rms"}, TypeError, "norm must be a Norm or None, got 'rms'"),
    ((X, X), {"branch_norm": Norm("layer")}, ValueError, "branch_norm must be of the kind .rms. or .none."),
    ((X, X), {"norm": Norm("none")}, ValueError, "norm must be of the kind .layer. or .rms., got"),
    ((X,), {"branch_norm": Norm("none", None, X[0, 0])}, ValueError, "there is nothing to compute"),
    ((X,), {"branch_norm": Norm("none", X[0, 0]), "norm": Norm("rms")}, ValueError, "gate and branch_norm"),
    ((X,), {"norm": Norm("rms", X[0, 0, :4])}, ValueError, r"weight must have shape \(8,\), got \(4,\)"),
    ((X,), {"norm": Norm("rms"), "factor": 2.0}, TypeError, "factor must be a torch.Tensor, got float"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "more", "kind", "text"), WRONG)
def test_wrong_arguments(args, more, kind, text):
    for path in (False, True):
        with kernels(direct=path), pytest.raises(kind, match=f"ada_norm: {text}"):
            ada_norm(*args, **more)


def test_rows_in_e4m3_need_a_norm():
    with pytest.raises(ValueError, match="ada_norm_in_e4m3: there must be a norm"):
        ada_norm_in_e4m3(X, X)
