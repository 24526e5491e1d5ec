"""``pad_frames`` against PyTorch's norm, concatenation and padding: interpreted, and on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.channel_norm import frames
from sdfastgn.kernels.channel_norm.frames import Norm, pad_frames, reference_pad_frames
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.common.plan_cache import Plans
from tests.kernels.ops import true_channel_norm
from tests.kernels.samples import (
    BOUNDS,
    DTYPES,
    LAYOUTS,
    PLACES,
    each_path,
    error,
    interpreted,
    kernels,
    make,
    to_layout,
)

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.multiprocessors(1)]
run = kernels(direct=True)(pad_frames)


def truth(x, cache=None, *, front=0, border=(0, 0), mode="zeros", keep=0, shift=None, norm=None):
    """(y, kept) in fp64."""
    u = x.double() if shift is None else x.double() + shift.double().view(-1, 1, 1, 1)
    if norm is not None:
        affine = (None if t is None else t.double() for t in norm[:2])
        u = true_channel_norm(u, *affine, *norm[2:])
    known = u if cache is None else torch.cat((cache.double(), u), 2)
    missing = front + x.shape[2] - known.shape[2]
    fill = "constant" if mode == "zeros" else "replicate"
    h, w = border
    kept = F.pad(known, (0, 0, 0, 0, missing, 0), fill)[:, :, known.shape[2] + missing - keep :]
    return F.pad(known, (w, w, h, h, missing, 0), fill), kept


def check(x, cache=None, *, bound=None, **options):
    y, kept = run(x, cache, **options)
    wanted, wanted_kept = truth(x, cache, **options)
    assert y.dtype == x.dtype
    assert y.shape == wanted.shape
    assert is_channels_last(y)
    assert error(y, wanted) < (bound or BOUNDS[x.dtype])
    # Borders and frames of the cache are exact.
    exact = truth(torch.full_like(x, float("nan")), cache, **options)[0].isfinite()
    assert torch.equal(y[exact], wanted[exact].to(y.dtype))
    if not options.get("keep"):
        assert kept is None
        return y, kept
    assert kept.shape == wanted_kept.shape
    assert is_channels_last(kept)
    h, w = options.get("border", (0, 0))
    centre = y[:, :, -options["keep"] :, h : y.shape[3] - h, w : y.shape[4] - w]
    assert torch.equal(kept, centre)
    return y, kept


def video(shape, dtype=torch.float32, device="cpu", layout="channels_last"):
    """(x, its cache's frames of the same size, norm, shift)"""
    x, weight, bias = make(shape, dtype, device, layout, mean=0.5)
    cache = make((*shape[:2], 2, *shape[3:]), dtype, device, layout, seed=3)[0]
    return x, cache, Norm(weight, bias, shape[1] ** 0.5, 1e-12, "silu"), make(shape, dtype, device, seed=5)[1]


@pytest.mark.parametrize("mode", ["zeros", "replicate"])
@pytest.mark.parametrize("border", [(0, 0), (1, 1), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("with_norm", [False, True], ids=["copy", "norm"])
def test_every_number_of_frames(with_norm, border, mode, device):
    for N, T, cached, front in (
        (2, 1, 0, 2),
        (1, 1, 1, 2),
        (1, 1, 2, 2),
        (2, 3, 2, 2),
        (1, 2, 0, 0),
        (1, 4, 1, 1),
    ):
        x, cache, norm, shift = video((N, 6, T, 3, 5), device=device)
        cache = None if cached == 0 else to_layout(cache[:, :, :cached], "channels_last")
        for keep, shifted in itertools.product((0, 1, 2), (None, shift)):
            if keep <= front + T:
                options = {"front": front, "border": border, "mode": mode, "keep": keep, "shift": shifted}
                check(x, cache, norm=norm if with_norm else None, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 30, 2, 3, 3), (1, 96, 1, 4, 6), (1, 1500, 1, 2, 1)], ids=str)
def test_every_dtype_and_width(shape, dtype, device):
    x, cache, norm, shift = video(shape, dtype, device)
    for border in ((0, 0), (1, 1)):
        check(x, cache, front=2, border=border, keep=2, norm=norm, shift=shift)
    check(x, cache, front=2, keep=2)
    check(x, norm=Norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, device):
    x, cache, norm, shift = video((2, 6, 2, 3, 4), device=device, layout=layout)
    check(x, cache, front=2, border=(1, 1), keep=2, norm=norm, shift=shift)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_in_memory(place, device):
    x, cache, norm, shift = video((2, 6, 2, 3, 4))
    x, cache, shift, weight, bias = (place(t).to(device) for t in (x, cache, shift, norm.weight, norm.bias))
    check(x, cache, front=2, keep=1, norm=Norm(weight, bias, 2.0), shift=shift)


def test_a_chunk_after_a_chunk_is_the_whole(device):
    """What is kept of one chunk is the next one's cache."""
    x, _, norm, _ = video((1, 6, 6, 3, 4), device=device)
    whole, _ = run(x, front=2, norm=norm)
    at, cache = 0, None
    for T in (1, 1, 3, 1):
        y, cache = run(x[:, :, at : at + T], cache, front=2, keep=2, norm=norm)
        assert torch.equal(y, whole[:, :, at : at + T + 2])
        at += T


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
def test_what_is_not_finite_stays_where_it_is(device):
    x, cache, norm, _ = video((1, 6, 2, 3, 4), device=device)
    x[0, 2, 1, 1, 1] = float("nan")
    cache[0, 1, 1, 2, 2] = float("inf")
    norm.bias[0] = float("inf")
    y, kept = run(x, cache, front=2, border=(1, 1), keep=2, norm=norm)
    wanted, _ = truth(x, cache, front=2, border=(1, 1), keep=2, norm=norm)
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.isinf(), wanted.isinf())
    assert torch.equal(kept.nan_to_num(7.0), y[:, :, -2:, 1:-1, 1:-1].nan_to_num(7.0))


def test_nothing_else_is_read_or_written(device):
    x, cache, norm, _ = video((1, 6, 2, 3, 4), device=device)
    buffer = torch.full((x.numel() + 2 * 24,), float("nan"), device=device)
    inside = buffer[24:-24].view(1, 2, 3, 4, 6).movedim(-1, 1)
    inside.copy_(x)
    before = buffer.clone()
    options = {"front": 2, "border": (1, 1), "norm": norm}
    assert torch.equal(run(inside, cache, **options)[0], run(x, cache, **options)[0])
    assert torch.equal(buffer.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("shape", [(0, 6, 2, 3, 4), (1, 6, 0, 3, 4), (1, 6, 2, 0, 4)], ids=str)
def test_empty(shape, device):
    x, cache, norm, _ = video(shape, device=device)
    y, kept = run(x, cache, front=2, border=(1, 0), keep=1, norm=norm)
    wanted, wanted_kept = truth(x, cache, front=2, border=(1, 0), keep=1, norm=norm)
    assert torch.equal(y, wanted.float())
    assert torch.equal(kept, wanted_kept.float())


def test_too_many_channels_or_rows_run_in_pytorch(monkeypatch, device):
    x, cache, norm, shift = video((1, 6, 2, 3, 4), device=device)
    options = {"front": 2, "border": (1, 1), "keep": 2, "norm": norm, "shift": shift}
    monkeypatch.setattr(frames, "_plans", Plans(frames._Call, lambda call: pytest.fail("a launch")))
    monkeypatch.setattr(frames, "_has_kernel", lambda call: False)
    check(x, cache, **options)


def test_gradients_are_those_of_pytorch(device):
    x, cache, norm, shift = video((1, 6, 2, 3, 4), device=device)
    operands = (x, cache, shift, norm.weight, norm.bias)

    def gradients(call, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in operands]
        x, cache, shift, weight, bias = leaves
        options = {"front": 2, "border": (1, 1), "mode": "replicate", "keep": 2, "shift": shift}
        with kernels(direct=True):
            y, kept = call(x, cache, norm=Norm(weight, bias, 2.0, 1e-12, "silu"), **options)
        return torch.autograd.grad(y.square().sum() + kept.sum(), leaves)

    for got, want in zip(gradients(pad_frames, x.dtype), gradients(truth, torch.float64), strict=True):
        assert error(got, want) < 1e-5


def test_the_reference_is_exact(device):
    x, cache, norm, shift = video((2, 6, 2, 3, 4), dtype=torch.float64, device=device)
    options = {"front": 2, "border": (1, 1), "mode": "replicate", "keep": 2, "shift": shift, "norm": norm}
    for got, want in zip(reference_pad_frames(x, cache, **options), truth(x, cache, **options), strict=True):
        torch.testing.assert_close(got, want)


def ones(*shape):
    return torch.ones(shape)


ERRORS = [
    ({"x": ones(1, 2, 3, 4)}, ValueError, "x must be (N, C, T, H, W), got shape (1, 2, 3, 4)"),
    ({"x": 3}, TypeError, "x must be a torch.Tensor, got int"),
    ({"cache": ones(1, 6, 3, 3, 4)}, ValueError, "(1, 6, 3, 3, 4) with at most front=2 frames"),
    ({"cache": ones(1, 6, 1, 3, 5)}, ValueError, "cache must have shape (1, 6, 1, 3, 4)"),
    ({"cache": ones(1, 6, 3, 4)}, ValueError, "got (1, 6, 3, 4)"),
    ({"cache": "Rep"}, TypeError, "cache must be a torch.Tensor, got str"),
    ({"cache": ones(1, 6, 1, 3, 4).half()}, TypeError, "cache must have the dtype torch.float32"),
    ({"cache": ones(1, 6, 1, 3, 4).to("meta")}, ValueError, "cache is on meta"),
    ({"shift": ones(3)}, ValueError, "shift must have shape (6,), got (3,)"),
    ({"norm": Norm(ones(6, 1, 1, 1))}, ValueError, "weight must have shape (6,), got (6, 1, 1, 1)"),
    ({"norm": Norm(activation="mish")}, ValueError, "unknown activation 'mish'"),
    ({"mode": "reflect"}, ValueError, "mode must be one of ('zeros', 'replicate'), got 'reflect'"),
    ({"front": -1}, ValueError, "front must not be negative, got -1"),
    ({"border": (0, 1.5)}, TypeError, "border must be an int, got 1.5"),
    ({"keep": 5}, ValueError, "keep=5 must be at most front + T, 4"),
    ({"x": ones(1, 6, 2, 0, 4), "mode": "replicate"}, ValueError, "mode 'replicate' needs elements"),
]


@each_path
@interpreted
@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS)
def test_errors_name_the_call_and_the_value(changes, kind, message, path):
    with path(), pytest.raises(kind) as caught:
        pad_frames(**{"x": ones(1, 6, 2, 3, 4), "front": 2, **changes})
    assert str(caught.value).startswith("sdfastgn.kernels.channel_norm.frames.pad_frames: ")
    assert message in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 96, 4, 480, 832), (1, 384, 1, 60, 104), (2, 30, 3, 17, 19)], ids=str)
def test_real_shapes_on_the_gpu(shape, dtype):
    x, cache, norm, shift = video(shape, dtype, "cuda")
    for border in ((0, 0), (1, 1)):
        check(x, cache, front=2, border=border, keep=2, norm=norm, shift=shift)
    check(x, front=2, border=(1, 1), mode="replicate", norm=norm)
    check(x, cache, front=2, keep=2)
