"""Statistics that a producer hands to the next norm are right or absent, and are freed with their tensor."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from diffusers.utils.torch_utils import apply_freeu
from torch import nn

import sdfastgn
from sdfastgn.kernels.common import gpu
from sdfastgn.kernels.statistics.op import reference_channel_statistics
from sdfastgn.patches.layers import statistics
from sdfastgn.patches.layers.statistics import add, add_bias, cat, take_statistics
from tests.kernels import samples
from tests.kernels.samples import BOUNDS, DTYPES
from tests.patches import cases
from tests.patches.cases import WHERE

SHAPE = (2, 30, 3, 5)
pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("on_each_device", "without_gradients", "statistics_always_pay"),
]


def image(*shape, **options):
    return cases.image(*(shape or SHAPE), **options)


def vector(dtype=torch.float32):
    return torch.randn(30).to(WHERE["device"], dtype)


def wrong_statistics():
    """Statistics of a tensor with mean 0 and variance 100, which no test tensor has."""
    found = torch.zeros(2, 2, 1, 30)
    found[1] = 15 * 100.0
    return found.to(WHERE["device"])


def made():
    """A tensor whose statistics are stored."""
    return add(image(), image(seed=1))


def is_true(found, y):
    expected = reference_channel_statistics(y.double(), found.shape[2])
    return torch.allclose(found.double(), expected, atol=1e-4, rtol=1e-5)


# --- the sum and the concatenation ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "divisor", "bias", "pays"),
    [
        pytest.param("channels_last", 1.0, True, True, id="channels-last"),
        pytest.param("channels_first", 2**0.5, True, True, id="channels-first"),
        pytest.param("channels_last", 2**0.5, False, False, id="does-not-emit"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add(dtype, layout, divisor, bias, pays, monkeypatch):
    monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW: pays)
    x, r = image(dtype=dtype, layout=layout), image(dtype=dtype, layout=layout, seed=1)
    b = vector(dtype) if bias else None
    y = add(x, r, b, divisor)
    total = x.double() + r.double() + (b.double()[:, None, None] if bias else 0)
    assert samples.error(y, total / divisor) < BOUNDS[dtype]
    assert y.stride() == x.stride()
    assert y.dtype is dtype
    found = take_statistics(y)
    assert is_true(found, y) if pays else found is None


@pytest.mark.parametrize("pays", [True, False], ids=["emits", "does-not-emit"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cat(dtype, pays, monkeypatch):
    monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW: pays)
    a, b = image(dtype=dtype), image(2, 5, 3, 5, dtype=dtype, seed=1)
    y = cat(a, b)
    assert torch.equal(y, torch.cat((a, b), 1))
    assert y.is_contiguous(memory_format=torch.channels_last)
    found = take_statistics(y)
    assert is_true(found, y) if pays else found is None


def wide(x):
    return x.double()


PLAIN = [
    pytest.param(wide, lambda r: r, id="two-dtypes"),
    pytest.param(wide, wide, id="float64"),
    pytest.param(lambda x: x, lambda r: r.contiguous(), id="two-layouts"),
    pytest.param(lambda x: x, lambda r: r[:, :, :1], id="broadcast"),
    pytest.param(lambda x: x[..., ::2], lambda r: r[..., ::2], id="gaps"),
    pytest.param(lambda x: x[:0], lambda r: r[:0], id="empty"),
    pytest.param(lambda x: nn.Parameter(x), lambda r: r, id="parameter"),
]


@pytest.mark.parametrize(("of_x", "of_residual"), [p for p in PLAIN if p.id != "gaps"])
def test_what_does_not_fit_the_kernel_is_added_as_ever(of_x, of_residual):
    x, r, bias = of_x(image()), of_residual(image(seed=1)), vector()
    y = add(x, r, bias, 1.5)
    torch.testing.assert_close(y, (r + (x + bias.to(x.dtype)[:, None, None])) / 1.5)
    assert take_statistics(y) is None


@pytest.mark.parametrize(("of_a", "of_b"), [p for p in PLAIN if p.id != "broadcast"])
def test_what_does_not_fit_the_kernel_is_concatenated_as_ever(of_a, of_b):
    a, b = of_a(image()), of_b(image(seed=1))
    y = cat(a, b)
    assert torch.equal(y, torch.cat((a, b), 1))
    assert y.stride() == torch.cat((a, b), 1).stride()
    assert take_statistics(y) is None


def test_views_with_gaps_are_added():
    x, r, bias = image()[..., ::2], image(seed=1)[..., ::2], vector()
    y = add(x, r, bias, 1.5)
    torch.testing.assert_close(y, (x + r + bias[:, None, None]) / 1.5)
    assert is_true(take_statistics(y), y)


@pytest.mark.parametrize("pays", [True, False], ids=["emits", "does-not-emit"])
def test_add_bias_writes_where_x_is(pays, monkeypatch):
    monkeypatch.setattr(statistics, "statistics_pay", lambda C, HW: pays)
    x, bias = image(), vector()
    expected = x + bias[:, None, None]
    y = add_bias(x, bias)
    assert y is x
    torch.testing.assert_close(y, expected)
    found = take_statistics(y)
    assert is_true(found, y) if pays else found is None
    y.zero_()
    assert add_bias(y, None) is y


@pytest.mark.parametrize(
    "of_x", [p.values[0] for p in PLAIN if p.id not in ("two-layouts", "broadcast", "two-dtypes")]
)
def test_what_does_not_fit_the_kernel_gets_its_bias_as_ever(of_x):
    x, bias = of_x(image()), vector()
    before = x.detach().clone()
    y = add_bias(x, bias)
    assert torch.equal(x, before)
    assert torch.equal(y, x + bias.to(x.dtype)[:, None, None])
    assert take_statistics(y) is None


def test_shapes_that_pytorch_refuses_are_refused():
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        cat(image(), image(2, 5, 3, 4))
    with pytest.raises(RuntimeError, match="must match the size"):
        add(image(), image(2, 5, 3, 5))


# --- true or absent -------------------------------------------------------------------------------


def test_they_are_there_once():
    y = made()
    assert is_true(take_statistics(y), y)
    assert take_statistics(y) is None


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda y: y.sum(), id="read"),
        pytest.param(lambda y: y[:, :2].view(2, 2, 15).clone().mul_(3), id="a-copy-written-to"),
        pytest.param(lambda y: y.detach(), id="detached"),
    ],
)
def test_reading_leaves_them(read):
    y = made()
    read(y)
    assert is_true(take_statistics(y), y)


def freeu(y):
    apply_freeu(0, y, image(seed=3), s1=0.9, s2=0.2, b1=1.4, b2=1.6)


def other_memory(y):
    y.data = y.data * 2


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda y: y.add_(1), id="in-place"),
        pytest.param(lambda y: y[:, :2].mul_(2), id="slice"),
        pytest.param(lambda y: y.permute(0, 2, 3, 1).view(-1)[:7].zero_(), id="view-of-a-view"),
        pytest.param(lambda y: y.detach().add_(1), id="detached"),
        pytest.param(lambda y: y.copy_(image(seed=4)), id="copy"),
        pytest.param(lambda y: torch.mul(y, 2, out=y), id="out"),
        pytest.param(lambda y: F.silu(y, inplace=True), id="activation"),
        pytest.param(lambda y: y.clamp_(-1, 1), id="clamp"),
        pytest.param(lambda y: torch._foreach_add_([y], 1), id="foreach"),
        pytest.param(lambda y: y.set_(image(seed=4)), id="set"),
        pytest.param(lambda y: y.resize_(1, 30, 3, 5), id="resize"),
        pytest.param(other_memory, id="other-memory"),
        pytest.param(freeu, id="freeu"),
        pytest.param(lambda y: y.requires_grad_(), id="gradient-wanted"),
    ],
)
def test_a_write_takes_them_away(write):
    y = made()
    write(y)
    assert take_statistics(y) is None


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda y: y.clone(), id="clone"),
        pytest.param(lambda y: y.view_as(y), id="view"),
        pytest.param(lambda y: y + 0, id="sum"),
        pytest.param(lambda y: y.half(), id="dtype"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(lambda y: pickle.loads(pickle.dumps(y)), id="pickle"),
    ],
)
def test_another_tensor_has_none(other):
    y = made()
    assert take_statistics(other(y)) is None


def test_files_do_not_hold_them():
    y = made()
    assert not vars(y)
    files = [io.BytesIO(), io.BytesIO()]
    torch.save(y, files[0])
    torch.save(y.clone(memory_format=torch.preserve_format), files[1])
    assert len(files[0].getvalue()) == len(files[1].getvalue())


def test_another_stream_gets_none(monkeypatch):
    y = made()
    monkeypatch.setattr(gpu, "current_stream", lambda device: 7)
    assert take_statistics(y) is None


def test_inference_tensors_hand_nothing_over():
    with torch.inference_mode():
        x, r = image(), image(seed=1)
        y = add(x, r)
        torch.testing.assert_close(y, x + r)
        assert take_statistics(y) is None
        assert take_statistics(cat(x, r)) is None


def test_gradients_wanted():
    with torch.enable_grad():
        x, r, bias = image().requires_grad_(), image(seed=1), vector().requires_grad_()
        y = add(x, r, bias, 2.0)
        assert y.grad_fn is not None
        assert take_statistics(y) is None
        for t, grad in zip((x, bias), torch.autograd.grad(y.sum(), (x, bias)), strict=True):
            torch.testing.assert_close(grad, torch.full_like(grad, 0.5 * x.numel() / t.numel()))
        joined = cat(x, r)
        assert joined.grad_fn is not None
        assert take_statistics(joined) is None


def test_transforms_are_left_alone():
    y = made()
    assert torch.func.vmap(lambda t: t + 0 * (take_statistics(y) is None))(image()).shape == SHAPE
    out, tangent = torch.func.jvp(lambda x: add(x, x, None, 4.0), (image(),), (image(),))
    torch.testing.assert_close(out, image() / 2)
    torch.testing.assert_close(tangent, image() / 2)


@pytest.mark.slow
def test_under_a_compiler():
    norm = sdfastgn.optimize(nn.Sequential(nn.GroupNorm(3, 30), nn.SiLU()).to(WHERE["device"]))

    def block(x, r):
        y = cat(add(x, r)[:, :15], r[:, :15])
        return norm(y), take_statistics(y) is None

    got, absent = torch.compile(block, backend="eager", fullgraph=True)(image(), image(seed=1))
    assert absent
    torch.testing.assert_close(got, block(image(), image(seed=1))[0])


# --- memory ---------------------------------------------------------------------------------------


def test_they_die_with_their_tensor():
    y = made()
    held = weakref.ref(take_statistics(statistics.store_statistics(y, wrong_statistics())))
    assert held() is None  # taken, and nobody kept it
    found = wrong_statistics()
    held = weakref.ref(found)
    statistics.store_statistics(y, found)
    del found
    gc.collect()
    assert held() is not None
    del y
    gc.collect()
    assert held() is None


def test_a_tensor_at_the_same_place_has_none():
    for _ in range(50):
        y = made()
        place = id(y)
        del y
        other = torch.ones(SHAPE, device=WHERE["device"])
        if id(other) == place:
            assert take_statistics(other) is None
            return
        del other
    pytest.skip("Python gave no object the same place")


# --- norms take them ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: nn.Sequential(nn.GroupNorm(3, 30)), id="norm"),
        pytest.param(lambda: nn.Sequential(nn.GroupNorm(3, 30), nn.SiLU()), id="norm-and-activation"),
    ],
)
def test_norms_use_what_was_handed_over(model):
    norm = sdfastgn.optimize(model().to(WHERE["device"]))
    y = made()
    stock = model().to(y)(y)
    torch.testing.assert_close(norm(y), stock)
    assert take_statistics(y) is None  # the norm has taken them
    scaled = norm(statistics.store_statistics(y, wrong_statistics()))
    assert not torch.allclose(scaled, stock, atol=0.1)  # it believed them
    torch.testing.assert_close(norm(y), stock)
    y.mul_(1)
    statistics.store_statistics(y, wrong_statistics())
    y.mul_(1)
    torch.testing.assert_close(norm(y), stock)


@pytest.mark.gpu
@pytest.mark.parametrize("on_each_device", ["cuda"], indirect=True)
def test_a_graph_does_not_keep_the_statistics_of_its_first_input():
    norm = sdfastgn.optimize(nn.Sequential(nn.GroupNorm(3, 30)).cuda())
    x, r = image(), image(seed=1)
    norm(add(x, r))
    norm(x)  # either way once before, since nothing is compiled within a capture
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        y = add(x, r)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            z = norm(y)
            w = norm(add(y, y))
        y.copy_(x * 3 + 7)
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(z, norm(y.clone(memory_format=torch.preserve_format)))
    torch.testing.assert_close(w, norm(y + y))
