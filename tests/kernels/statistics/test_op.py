"""The producers of statistics as PyTorch citizens: fallback, errors, gradients, fake tensors, compile."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sdfastgn
from sdfastgn.kernels.statistics.op import reference_channel_statistics

NAMES = ["channel_statistics", "add_with_statistics", "cat_with_statistics"]
LAYOUTS = [pytest.param(True, id="channels_last"), pytest.param(False, id="channels_first")]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def image(*shape, dtype=torch.float32, last=True, seed=0, device="cpu"):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype) * 1.5 + 2
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def assert_statistics_of(statistics, y):
    assert statistics.dtype is torch.float32
    expected = reference_channel_statistics(y.double(), statistics.shape[2])
    torch.testing.assert_close(statistics.double(), expected, atol=1e-5, rtol=1e-5)


# --- the fallback on a CPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 12, 5, 6), (2, 12, 7), (2, 12, 2, 3, 4), (1, 3, 70, 70)], ids=str)
def test_fallback_is_plain_pytorch(shape, dtype, last):
    x, r = image(*shape, dtype=dtype, last=last), image(*shape, dtype=dtype, last=last, seed=1)
    bias = torch.randn(shape[1])
    y, statistics = sdfastgn.add_with_statistics(x, r, bias, scale=0.5)
    expected = (x.double() + r.double() + bias.double().view(-1, *[1] * (len(shape) - 2))) * 0.5
    torch.testing.assert_close(
        y.double(), expected, atol=torch.finfo(dtype).eps * 4, rtol=torch.finfo(dtype).eps
    )
    assert y.dtype is dtype
    assert y.stride() == x.stride()
    assert_statistics_of(statistics, y)
    joined, statistics = sdfastgn.cat_with_statistics(x, r)
    assert torch.equal(joined, torch.cat((x, r), 1))
    assert_statistics_of(statistics, joined)
    assert_statistics_of(sdfastgn.channel_statistics(x), x)


# --- errors ---------------------------------------------------------------------------------------------------------------------

ONES = torch.ones(2, 4, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "message"),
    [
        pytest.param(NAMES[0], ([1.0],), TypeError, "x must be a floating torch.Tensor, got list", id="list"),
        pytest.param(NAMES[0], (ONES.long(),), TypeError, "got torch.int64", id="integers"),
        pytest.param(NAMES[0], (ONES.to(torch.complex64),), TypeError, "got torch.complex64", id="complex"),
        pytest.param(NAMES[0], (ONES[0],), ValueError, "got shape (4, 3)", id="rank2"),
        pytest.param(NAMES[1], (ONES[0], ONES[0]), ValueError, "x must be (N, C, *spatial), got shape (4, 3)", id="add-rank2"),
        pytest.param(NAMES[1], (ONES, None), TypeError, "residual must be a floating torch.Tensor, got NoneType", id="residual-none"),
        pytest.param(
            NAMES[1], (ONES, ONES[:1]), ValueError, "residual must have shape (2, 4, 3), got (1, 4, 3)", id="residual-shape"
        ),
        pytest.param(NAMES[1], (ONES, ONES.half()), TypeError, "dtype torch.float32, got torch.float16", id="residual-dtype"),
        pytest.param(NAMES[1], (ONES, ONES.to("meta")), ValueError, "residual is on meta", id="residual-device"),
        pytest.param(NAMES[1], (ONES, ONES, torch.ones(3)), ValueError, "bias must be (4,) on cpu, got (3,) on cpu", id="bias-shape"),
        pytest.param(
            NAMES[1], (ONES, ONES, torch.ones(4, device="meta")), ValueError, "got (4,) on meta", id="bias-device"
        ),
        pytest.param(NAMES[1], (ONES, ONES, torch.ones(4).long()), TypeError, "bias must be a floating", id="bias-integers"),
        pytest.param(NAMES[2], (ONES, [0.0]), TypeError, "b must be a floating torch.Tensor, got list", id="cat-list"),
        pytest.param(NAMES[2], (ONES[0], ONES), ValueError, "a must be (N, C, *spatial), got shape (4, 3)", id="cat-rank2"),
        pytest.param(
            NAMES[2], (ONES, ONES[..., :2]), ValueError, "b must have shape (2, 4, 3), got (2, 4, 2)", id="cat-shape"
        ),
        pytest.param(NAMES[2], (ONES, ONES[..., None]), ValueError, "got (2, 4, 3, 1)", id="cat-rank"),
        pytest.param(NAMES[2], (ONES, ONES.double()), TypeError, "dtype torch.float32, got torch.float64", id="cat-dtype"),
        pytest.param(NAMES[2], (ONES, ONES.to("meta")), ValueError, "b is on meta", id="cat-device"),
    ],
)  # fmt: skip
def test_errors_name_the_call_and_the_value(name, arguments, kind, message):
    with pytest.raises(kind) as caught:
        getattr(sdfastgn, name)(*arguments)
    assert str(caught.value).startswith(f"sdfastgn.{name}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("scale", ["1", True, None])
def test_the_scale_is_a_number(scale):
    with pytest.raises(
        TypeError, match=rf"sdfastgn.add_with_statistics: scale must be a number, got {scale!r}"
    ):
        sdfastgn.add_with_statistics(ONES, ONES, scale=scale)


# --- gradients ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", LAYOUTS)
def test_first_and_second_derivative(last):
    x, r = (image(2, 6, 3, 4, dtype=torch.float64, last=last, seed=s).requires_grad_() for s in (0, 1))
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def add(x, r, bias):
        return sdfastgn.add_with_statistics(x, r, bias, scale=0.7)[0]

    def cat(x, r):
        return sdfastgn.cat_with_statistics(x, r[:, :2])[0]

    for f, leaves in ((add, (x, r, bias)), (cat, (x, r))):
        assert torch.autograd.gradcheck(f, leaves)
        assert torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.parametrize("needs", ["x", "r", "bias"])
def test_frozen_inputs_get_no_gradient(needs):
    leaves = {"x": image(2, 6, 3, 4), "r": image(2, 6, 3, 4, seed=1), "bias": torch.randn(6)}
    leaves[needs].requires_grad_()
    sdfastgn.add_with_statistics(*leaves.values(), scale=0.5)[0].sum().backward()
    assert {name for name, t in leaves.items() if t.grad is not None} == {needs}


def test_the_gradient_of_a_bias_of_another_dtype():
    x, bias = image(2, 6, 30, 40, dtype=torch.float16), torch.randn(6, requires_grad=True)
    sdfastgn.add_with_statistics(x, x, bias, scale=0.5)[0].sum().backward()
    assert bias.grad.dtype is torch.float32
    torch.testing.assert_close(bias.grad, torch.full((6,), 2 * 30 * 40 * 0.5))


def test_statistics_carry_no_gradient():
    x = image(2, 6, 3, 4).requires_grad_()
    y, statistics = sdfastgn.add_with_statistics(x, x)
    joined, joined_statistics = sdfastgn.cat_with_statistics(x, x)
    assert y.requires_grad
    assert joined.requires_grad
    for t in (statistics, joined_statistics, sdfastgn.channel_statistics(x)):
        assert not t.requires_grad


def test_gradients_through_a_norm_that_is_given_statistics_are_whole():
    """As if it had taken them itself: the statistics depend on x too."""
    x, r = (
        image(2, 6, 3, 4, dtype=torch.float64).requires_grad_(),
        image(2, 6, 3, 4, dtype=torch.float64, seed=1),
    )

    def loss(statistics):
        y, found = sdfastgn.add_with_statistics(x, r)
        return (
            sdfastgn.group_norm(y, 3, statistics=found if statistics else None, activation="silu")
            .square()
            .sum()
        )

    given, taken = (torch.autograd.grad(loss(statistics), x)[0] for statistics in (True, False))
    torch.testing.assert_close(given, taken)


# --- tracing --------------------------------------------------------------------------------------------------------------------

SAMPLES = [
    pytest.param((2, 6, 4, 5), True, id="channels-last"),
    pytest.param((2, 6, 4, 5), False, id="channels-first"),
    pytest.param((2, 6, 7), True, id="rank3"),
    pytest.param((1, 6, 40, 50), True, id="several-chunks"),
]


@pytest.mark.parametrize(("shape", "last"), SAMPLES)
def test_opcheck(shape, last):
    x, r = image(*shape, last=last).requires_grad_(), image(*shape, last=last, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.sdfastgn.channel_statistics, (x.detach(),))
    torch.library.opcheck(
        torch.ops.sdfastgn.add_with_statistics, (x, r, torch.randn(6, requires_grad=True), 0.5)
    )
    torch.library.opcheck(torch.ops.sdfastgn.add_with_statistics, (x, r, None, 1.0))
    torch.library.opcheck(torch.ops.sdfastgn.cat_with_statistics, (x, r))


VIEWS = [
    pytest.param(lambda x: x, id="whole"),
    pytest.param(lambda x: x[:, :3], id="channels"),
    pytest.param(lambda x: x[:, ::2], id="every-second-channel"),
    pytest.param(lambda x: x[..., ::2], id="every-second-column"),
    pytest.param(lambda x: x[:1].expand(3, *x.shape[1:]), id="expanded"),
    pytest.param(lambda x: x[:, :1], id="one-channel"),
    pytest.param(lambda x: x[..., :1], id="one-column"),
]


def strides(t):
    """Those that have a meaning: of dimensions of more than one element."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("shape", "last"), SAMPLES)
def test_fake_tensors_have_the_real_strides_and_chunks(shape, last, view):
    x = view(image(*shape, last=last))

    def calls(x):
        joined = (*sdfastgn.cat_with_statistics(x, x), *sdfastgn.cat_with_statistics(x, x.contiguous()))
        return (sdfastgn.channel_statistics(x), *sdfastgn.add_with_statistics(x, x), *joined)

    with FakeTensorMode() as mode:
        fakes = calls(mode.from_tensor(x))
    for fake, real in zip(fakes, calls(x), strict=True):
        assert fake.shape == real.shape
        assert strides(fake) == strides(real)
        assert fake.dtype is real.dtype


@pytest.mark.parametrize("last", LAYOUTS)
def test_compiles_without_a_graph_break(last):
    def block(x, r, bias):
        y, statistics = sdfastgn.add_with_statistics(x, r, bias, scale=0.5)
        y, statistics = sdfastgn.cat_with_statistics(sdfastgn.group_norm(y, 3, statistics=statistics), r)
        y = sdfastgn.group_norm(y, 3, activation="silu", statistics=statistics)
        return sdfastgn.group_norm(y, 3, statistics=sdfastgn.channel_statistics(y), tokens=True)

    leaves = [
        image(2, 6, 4, 5, last=last).requires_grad_(),
        image(2, 6, 4, 5, last=last, seed=1).requires_grad_(),
    ]
    leaves.append(torch.randn(6, requires_grad=True))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), block(*leaves))
    found, expected = (torch.autograd.grad(f(*leaves).pow(3).sum(), leaves) for f in (compiled, block))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# --- GPU ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("last", LAYOUTS)
def test_inference_and_training_agree(last):
    """One goes straight to the kernels, the other through the dispatcher and autograd."""
    x, r = (image(2, 320, 33, 31, dtype=torch.float16, last=last, seed=s, device="cuda") for s in (0, 1))
    for f in (sdfastgn.add_with_statistics, sdfastgn.cat_with_statistics):
        direct, recorded = f(x, r), f(x.clone().requires_grad_(), r)
        assert recorded[0].grad_fn is not None
        assert all(torch.equal(a, b) for a, b in zip(direct, recorded, strict=True))
        with FakeTensorMode() as mode:
            fakes = f(mode.from_tensor(x), mode.from_tensor(r))
        assert [(t.shape, t.stride()) for t in fakes] == [(t.shape, t.stride()) for t in direct]


@pytest.mark.gpu
def test_cuda_graph_replays_on_new_data():
    x, r = (image(2, 320, 64, 64, dtype=torch.float16, seed=s, device="cuda") for s in (0, 1))

    def block():
        y, statistics = sdfastgn.add_with_statistics(x, r, scale=0.5)
        return sdfastgn.group_norm(y, 32, activation="silu", statistics=statistics)

    block()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block()
    x.copy_(image(2, 320, 64, 64, dtype=torch.float16, seed=5, device="cuda") * 3)
    graph.replay()
    assert torch.equal(y, block())
