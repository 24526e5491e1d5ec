"""``pad_frames`` against PyTorch's norms, upsampling and padding: interpreted, and on a GPU."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.kernels.common.activations import ACTIVATIONS
from sdfastgn.kernels.common.layout import is_channels_last
from sdfastgn.kernels.common.plan_cache import Plans
from sdfastgn.kernels.pad_frames import op
from sdfastgn.kernels.pad_frames.op import GroupNorm, Norm, pad_frames, reference_pad_frames
from tests.kernels.ops import true_channel_norm, true_group_norm
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
    run_statistics,
    to_layout,
)

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.multiprocessors(1)]
run = kernels(direct=True)(pad_frames)


def truth(
    x,
    cache=None,
    *,
    front=0,
    back=0,
    border=(0, 0),
    mode="zeros",
    keep=0,
    shift=None,
    norm=None,
    upsample=(1, 1, 1),
):
    """Computes (y, kept) in fp64."""
    u = x.double() if shift is None else x.double() + shift.double().view(-1, 1, 1, 1)
    if norm is not None:
        weight, bias = (None if t is None else t.double() for t in (norm.weight, norm.bias))
        if isinstance(norm, GroupNorm):
            act = "identity" if norm.modulation is not None else norm.activation
            u = u.movedim(2, 1).flatten(0, 1) if norm.framewise else u
            if norm.pads_first:
                u, front, back = F.pad(u, (0, 0, 0, 0, front, back), "replicate"), 0, 0
            u = true_group_norm(u, norm.num_groups, weight, bias, norm.eps, act)
            u = u.unflatten(0, (len(x), -1)).movedim(2, 1) if norm.framewise else u
            if norm.modulation is not None:
                factor, offset = true_modulation(norm.modulation.double(), x.shape[2:]).chunk(2, 1)
                u = ACTIVATIONS[norm.activation](u * factor + offset)
        else:
            u = true_norm(u, weight, bias, norm)
    u = true_upsampling(u, upsample)
    known = u if cache is None else torch.cat((cache.double(), u), 2)
    missing = front + u.shape[2] - known.shape[2]
    fill = "constant" if mode == "zeros" else "replicate"
    of_borders = "reflect" if mode == "reflect" else fill
    h, w = border
    whole = F.pad(known, (0, 0, 0, 0, missing, back), fill)
    return F.pad(whole, (w, w, h, h, 0, 0), of_borders), whole[:, :, whole.shape[2] - keep :]


def true_norm(u, weight, bias, norm):
    if not norm.added:
        return true_channel_norm(u, weight, bias, *norm[2:5])
    weight, bias = ((t if t is None else t.view(-1, 1, 1, 1)) for t in (weight, bias))
    u = u / (u.square().sum(1, keepdim=True) + norm.added).sqrt() * norm.scale
    u = (u if weight is None else u * weight) + (0 if bias is None else bias)
    return F.silu(u) if norm.activation == "silu" else u


def true_modulation(z, size):
    """Upsamples ``z`` to ``size`` as CogVideoX does.

    If the number of frames in ``size`` is odd and not 1, the first frame is upsampled by itself.
    """
    if size[0] == 1 or size[0] % 2 == 0:
        return F.interpolate(z, size=size)
    first = F.interpolate(z[:, :, :1], size=(1, *size[1:]))
    return torch.cat((first, F.interpolate(z[:, :, 1:], size=(size[0] - 1, *size[1:]))), 2)


def true_upsampling(u, times):
    """Upsamples ``u`` as HunyuanVideo does: the first frame is not repeated along T."""
    if 0 in u.shape:
        return u.new_empty(
            (*u.shape[:2], *(size * count for size, count in zip(u.shape[2:], times, strict=True)))
        )
    first = F.interpolate(u[:, :, 0], scale_factor=times[1:], mode="nearest")[:, :, None]
    if u.shape[2] == 1:
        return first
    others = F.interpolate(u[:, :, 1:].contiguous(), scale_factor=times, mode="nearest")
    return torch.cat((first, others), 2)


def check(x, cache=None, *, bound=None, **options):
    y, kept = run(x, cache, **options)
    wanted, wanted_kept = truth(x, cache, **options)
    assert y.dtype == x.dtype
    assert y.shape == wanted.shape
    assert is_channels_last(y)
    assert error(y, wanted) < (bound or BOUNDS[x.dtype])
    # Values that do not depend on x (borders and frames of the cache) are exact.
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
    """Makes (x, cache, norm, shift). The cache has two frames of the size of x."""
    x, weight, bias = make(shape, dtype, device, layout, mean=0.5)
    cache = make((*shape[:2], 2, *shape[3:]), dtype, device, layout, seed=3)[0]
    return x, cache, Norm(weight, bias, shape[1] ** 0.5, 1e-12, "silu"), make(shape, dtype, device, seed=5)[1]


def groups(norm, num_groups=3, **options):
    """A ``GroupNorm`` with the parameters and the activation of ``norm``."""
    return GroupNorm(num_groups, norm.weight, norm.bias, 1e-5, norm.activation, **options)


NORMS = {
    "copy": lambda norm: None,
    "norm": lambda norm: norm,
    "groups": groups,
    "framewise": lambda norm: groups(norm, framewise=True),
}


MODES = ["zeros", "replicate", "reflect"]
BORDERS = [(0, 0), (1, 1), (2, 0), (0, 3)]
# N, frames of x, frames of the cache, front.
FRAMES = [(2, 1, 0, 2), (1, 1, 1, 2), (1, 1, 2, 2), (2, 3, 2, 2), (1, 2, 0, 0), (1, 4, 1, 1)]
EVERY = list(itertools.product(FRAMES, (0, 1, 2), (False, True)))


def every_twelfth(kind, border, mode):
    """Three of ``EVERY``: together all of them for each kind, and each pair of values of two parameters."""
    first = 3 * BORDERS.index(border) + MODES.index(mode) + 5 * list(NORMS).index(kind)
    return EVERY[first % 12 :: 12]


@pytest.mark.drawn(12)
@pytest.mark.parametrize(
    "some", [every_twelfth, pytest.param(lambda *_: EVERY, id="every", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("border", BORDERS, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_every_number_of_frames(kind, border, mode, some, device):
    for (N, T, cached, front), keep, is_shifted in some(kind, border, mode):
        x, cache, norm, shift = video((N, 6, T, 3, 5), device=device)
        cache = None if cached == 0 else to_layout(cache[:, :, :cached], "channels_last")
        options = {"front": front, "border": border, "mode": mode, "keep": keep}
        check(x, cache, norm=NORMS[kind](norm), shift=shift if is_shifted else None, **options)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 30, 2, 3, 3), (1, 96, 1, 4, 6), (1, 1500, 1, 2, 1)], ids=str)
def test_every_dtype_and_width(shape, dtype, device):
    x, cache, norm, shift = video(shape, dtype, device)
    for border in ((0, 0), (1, 1)):
        check(x, cache, front=2, border=border, keep=2, norm=norm, shift=shift)
        for shifted in (None, shift):
            check(x, cache, front=2, border=border, keep=2, norm=groups(norm), shift=shifted)
            each = groups(norm, framewise=True)
            check(x, cache, front=2, border=border, keep=2, norm=each, shift=shifted)
    check(x, cache, front=2, keep=2)
    check(x, norm=Norm())
    check(x, norm=GroupNorm(2))


@pytest.mark.drawn(10)
@pytest.mark.parametrize("kind", ["copy", "norm", "groups"])
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
@pytest.mark.parametrize("upsample", [(1, 2, 2), (2, 2, 2), (2, 1, 1), (3, 1, 2)], ids=str)
def test_upsampling(upsample, mode, kind, device):
    for N, T in ((1, 1), (2, 3)):
        x, _, norm, shift = video((N, 6, T, 3, 5), device=device)
        _, h, w = upsample
        cache, *_ = video((N, 6, 2, 3 * h, 5 * w), device=device)
        for border in ((0, 0), (1, 1)):
            options = {
                "front": 2,
                "border": border,
                "mode": mode,
                "upsample": upsample,
                "norm": NORMS[kind](norm),
            }
            check(x, **options)
            check(x, cache, keep=2, shift=shift, **options)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
def test_frames_behind(mode, kind, device):
    for T, front, back, times in ((1, 1, 1, 1), (3, 1, 2, 1), (3, 0, 1, 2), (2, 2, 0, 1)):
        x, cache, norm, shift = video((2, 6, T, 3, 5), device=device)
        options = {"front": front, "back": back, "mode": mode, "norm": NORMS[kind](norm)}
        if kind != "framewise":
            check(x, shift=shift, upsample=(times, 1, 1), **options)
        for border in ((0, 0), (1, 2)):
            for keep in (1, front + back + T):
                check(x, border=border, keep=keep, **options)
        if front == 2:
            check(x, cache, border=(1, 1), keep=3, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C", [6, 1500])
def test_an_eps_within_the_root(C, dtype, device):
    x, _, norm, shift = video((2, C, 2, 3, 2), dtype, device)
    for each in (norm._replace(added=1e-2 * C), Norm(scale=C**0.5, added=1e-8 * C)):
        check(x, front=1, norm=each)
        check(x, shift=shift, norm=each)
    # What is small is not blown up.
    check(x * 1e-4, norm=Norm(scale=C**0.5, added=1e-8 * C))
    y, _ = run(torch.zeros_like(x), norm=Norm(added=1e-8))
    assert not y.any()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect"])
@pytest.mark.parametrize("kind", ["copy", "norm", "groups"])
def test_windows_are_frames_side_by_side(kind, mode, device):
    for N, T, front, back, border, upsample in (
        (2, 3, 2, 0, (0, 0), (1, 1, 1)),
        (1, 1, 2, 1, (1, 2), (1, 1, 1)),
        (2, 2, 1, 2, (0, 1), (2, 2, 1)),
    ):
        x, _, norm, shift = video((N, 6, T, 3, 5), device=device)
        _, h, w = upsample
        cache, *_ = video((N, 6, 2, 3 * h, 5 * w), device=device)
        options = {"front": front, "back": back, "border": border, "mode": mode, "upsample": upsample}
        options |= {"keep": 1, "shift": shift, "norm": NORMS[kind](norm)}
        for cached in (None, to_layout(cache[:, :, :1], "channels_last")):
            frames, kept = run(x, cached, **options)
            for window in (2, 3):
                y, also_kept = run(x, cached, **options, window=window)
                assert is_channels_last(y)
                count = frames.shape[2] - window + 1
                wanted = torch.cat([frames[:, :, k : k + count] for k in range(window)], 1)
                assert torch.equal(y, wanted)
                assert torch.equal(kept, also_kept)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("frames", "of"), [(1, 1), (3, 3), (5, 3), (9, 3), (2, 2), (4, 2), (6, 2), (8, 1)], ids=str
)
def test_modulation(frames, of, dtype, device):
    for N, h, w in ((1, 1, 1), (2, 2, 4)):
        x, cache, norm, shift = video((N, 6, frames, 2 * h, 3 * w), dtype, device)
        modulation = make((N, 12, of, 2, 3), dtype, device, "channels_first", seed=8)[0]
        norm = groups(norm, modulation=modulation)
        check(x, cache, front=2, keep=2, norm=norm)
        check(x, front=2, border=(1, 1), mode="replicate", shift=shift, norm=norm)
        check(x, norm=norm._replace(weight=None, bias=None, activation="identity"))


@pytest.mark.parametrize("frames", [2, 3])
@pytest.mark.parametrize("mode", ["zeros", "replicate", "reflect"])
def test_modulation_with_frames_behind(mode, frames, device):
    x, cache, norm, shift = video((2, 6, frames, 4, 6), device=device)
    modulation = make((2, 12, 2, 2, 3), x.dtype, device, "channels_last", seed=8)[0]
    for each in (groups(norm, modulation=modulation), groups(norm, modulation=modulation, framewise=True)):
        options = {"front": 2, "back": 2, "border": (1, 2), "mode": mode, "keep": 3, "norm": each}
        check(x, shift=shift, **options)
        check(x, cache, **options)


def test_statistics_that_are_given(device):
    """Given statistics are used, and are not computed from x."""
    x, _, norm, shift = video((2, 6, 3, 5, 7), device=device)
    statistics = run_statistics(x)
    options = {"front": 2, "border": (1, 1), "mode": "replicate"}
    check(x, norm=groups(norm, statistics=statistics), shift=shift, **options)
    # With the statistics of 2 x the result is wrong in a known way.
    statistics *= torch.tensor([2.0, 4.0], device=device).view(2, 1, 1, 1)
    plain = GroupNorm(3, eps=0.0)
    y, _ = run(x, norm=plain._replace(statistics=statistics), **options)
    z, _ = truth(x, norm=plain, **options)
    mean, deviation = (getattr(x.double().unflatten(1, (3, 2)), f)(dim=(2, 3, 4, 5)) for f in ("mean", "std"))
    count = 2 * 3 * 5 * 7
    moved = mean / (deviation * ((count - 1) / count) ** 0.5)
    assert error(y, (z - moved.repeat_interleave(2, 1)[:, :, None, None, None]) / 2) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "front", "back"), [(1, 1, 1), (3, 1, 1), (2, 2, 0)], ids=str)
def test_a_norm_of_padded_frames(T, front, back, dtype, device):
    x, _, norm, shift = video((2, 6, T, 3, 4), dtype, device)
    # Frames that differ, so that it matters which count twice.
    x += torch.arange(T, device=device).view(-1, 1, 1)
    padded = F.pad(x, (0, 0, 0, 0, front, back), "replicate")
    images = padded.movedim(2, 1).flatten(0, 1).contiguous(memory_format=torch.channels_last)
    statistics = run_statistics(images).unflatten(1, (2, -1)).flatten(2, 3)
    for shifted in (None, shift):
        each = groups(norm, statistics=statistics, pads_first=True)
        options = {"front": front, "back": back, "border": (1, 1), "mode": "replicate", "shift": shifted}
        options["bound"] = 2 * BOUNDS[dtype]  # some results are larger than 1
        check(x, norm=each, keep=1, **options)
        check(x, norm=each._replace(statistics=None), **options)
        # Chunks that do not divide the padded frames evenly.
        check(x, norm=each._replace(statistics=statistics.repeat(1, 1, 5, 1)), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, device):
    x, cache, norm, shift = video((2, 6, 2, 3, 4), device=device, layout=layout)
    for each in (norm, groups(norm)):
        check(x, cache, front=2, border=(1, 1), keep=2, norm=each, shift=shift)
    check(x, cache, front=2, keep=2, norm=groups(norm, framewise=True), shift=shift)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_in_memory(place, device):
    x, cache, norm, shift = video((2, 6, 2, 3, 4))
    x, cache, shift, weight, bias = (place(t).to(device) for t in (x, cache, shift, norm.weight, norm.bias))
    check(x, cache, front=2, keep=1, norm=Norm(weight, bias, 2.0), shift=shift)
    check(x, cache, front=2, keep=1, norm=GroupNorm(2, weight, bias), shift=shift)


def test_a_chunk_after_a_chunk_is_the_whole(device):
    """``kept`` of one chunk is the cache of the next chunk."""
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
    of_groups = GroupNorm(3, norm.weight, norm.bias)
    buffer = torch.full((x.numel() + 2 * 24,), float("nan"), device=device)
    inside = buffer[24:-24].view(1, 2, 3, 4, 6).movedim(-1, 1)
    inside.copy_(x)
    before = buffer.clone()
    for each in (norm, of_groups):
        options = {"front": 2, "border": (1, 1), "norm": each}
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
    monkeypatch.setattr(
        op, "_plans", Plans("pad_frames", op.PadFramesCall, lambda call: pytest.fail("a launch"))
    )
    monkeypatch.setattr(op, "_has_kernel", lambda call: False)
    check(x, cache, **options)
    check(x, cache, **{**options, "norm": groups(norm)})


@pytest.mark.parametrize("of_groups", [False, True], ids=["channels", "groups"])
def test_gradients_are_those_of_pytorch(of_groups, device):
    x, cache, norm, shift = video((1, 6, 2, 3, 4), device=device)
    operands = (x, cache, shift, norm.weight, norm.bias)

    def gradients(call, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in operands]
        x, cache, shift, weight, bias = leaves
        options = {"front": 2, "border": (1, 1), "mode": "replicate", "keep": 2, "shift": shift}
        with kernels(direct=True):
            norm = Norm(weight, bias, 2.0, 1e-12, "silu")
            y, kept = call(x, cache, norm=groups(norm) if of_groups else norm, **options)
        return torch.autograd.grad(y.square().sum() + kept.sum(), leaves)

    for got, want in zip(gradients(pad_frames, x.dtype), gradients(truth, torch.float64), strict=True):
        assert error(got, want) < 1e-5


def test_the_reference_is_exact(device):
    x, cache, norm, shift = video((2, 6, 2, 3, 4), dtype=torch.float64, device=device)
    options = {"front": 2, "border": (1, 1), "mode": "replicate", "keep": 2, "shift": shift, "norm": norm}
    for changes in ({}, {"norm": groups(norm)}):
        options |= changes
        found = reference_pad_frames(x, cache, **options), truth(x, cache, **options)
        for got, want in zip(*found, strict=True):
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
    ({"norm": Norm(activation="elu")}, ValueError, "unknown activation 'elu'"),
    ({"norm": GroupNorm(2, pads_first=True)}, ValueError, "another mode than 'zeros'"),
    (
        {"norm": GroupNorm(2, pads_first=True, framewise=True), "mode": "replicate"},
        ValueError,
        "framewise=False, got mode='replicate'",
    ),
    ({"norm": GroupNorm(2, modulation=3)}, TypeError, "modulation must be a torch.Tensor, got int"),
    (
        {"norm": GroupNorm(2, modulation=ones(1, 12, 2, 3, 4).half())},
        TypeError,
        "modulation must have the dtype",
    ),
    (
        {"norm": GroupNorm(2, modulation=ones(1, 6, 2, 3, 4))},
        ValueError,
        "modulation must have shape (1, 12, t",
    ),
    ({"norm": GroupNorm(2, modulation=ones(1, 12, 2, 2, 4))}, ValueError, "got (1, 12, 2, 2, 4)"),
    ({"norm": GroupNorm(2, modulation=ones(1, 12, 3, 3, 4))}, ValueError, "got (1, 12, 3, 3, 4)"),
    (
        {"x": ones(1, 6, 3, 3, 4), "norm": GroupNorm(2, modulation=ones(1, 12, 1, 3, 4))},
        ValueError,
        "got (1, 12, 1, 3, 4)",
    ),
    (
        {"norm": GroupNorm(2, framewise=True), "upsample": (2, 1, 1)},
        ValueError,
        "upsample must be (1, 1, 1) with this norm, got (2, 1, 1)",
    ),
    (
        {"norm": GroupNorm(2, statistics=ones(2, 1, 1, 6), framewise=True)},
        ValueError,
        "statistics must have shape (2, 2, P, 6), got (2, 1, 1, 6)",
    ),
    (
        {"norm": GroupNorm(2, modulation=ones(1, 12, 1, 3, 4)), "upsample": (1, 2, 2)},
        ValueError,
        "upsample must be (1, 1, 1) with this norm, got (1, 2, 2)",
    ),
    (
        {"mode": "circular"},
        ValueError,
        "mode must be one of ('zeros', 'replicate', 'reflect'), got 'circular'",
    ),
    (
        {"mode": "reflect", "border": (1, 4)},
        ValueError,
        "border must be smaller than the frame (3, 4), got (1, 4)",
    ),
    ({"front": -1}, ValueError, "front must not be negative, got -1"),
    ({"back": -1}, ValueError, "back must not be negative, got -1"),
    ({"back": 1.5}, TypeError, "back must be an int, got 1.5"),
    ({"border": (0, 1.5)}, TypeError, "border must be an int, got 1.5"),
    ({"upsample": (1, 0, 2)}, ValueError, "upsample must be positive, got 0"),
    ({"upsample": (1, 2.5, 2)}, TypeError, "upsample must be an int, got 2.5"),
    ({"norm": GroupNorm(4)}, ValueError, "num_groups=4 must be a positive divisor of C=6"),
    ({"norm": GroupNorm(2.0)}, TypeError, "num_groups must be an int, got 2.0"),
    ({"norm": GroupNorm(0)}, ZeroDivisionError, "num_groups must be positive, got 0"),
    ({"norm": GroupNorm(2, statistics=ones(2, 1, 6))}, ValueError, "statistics must have shape (2, 1, P, 6)"),
    ({"norm": GroupNorm(2, ones(3))}, ValueError, "weight must have shape (6,), got (3,)"),
    (
        {"cache": ones(1, 6, 1, 3, 4), "upsample": (1, 2, 2)},
        ValueError,
        "cache must have shape (1, 6, 1, 6, 8)",
    ),
    ({"window": 0}, ValueError, "window=0 must be at least 1 and at most front + T + back, 4"),
    ({"window": 5}, ValueError, "window=5 must be at least 1 and at most front + T + back, 4"),
    ({"window": 1.5}, TypeError, "window must be an int, got 1.5"),
    ({"window": 6, "back": 1}, ValueError, "window=6 must be at least 1 and at most front + T + back, 5"),
    ({"keep": 5}, ValueError, "keep=5 must be at most front + T + back, 4"),
    ({"x": ones(1, 6, 2, 0, 4), "mode": "replicate"}, ValueError, "mode 'replicate' needs elements"),
    ({"border": 1}, TypeError, "border must be a tuple of 2 ints, got 1"),
    ({"border": (1, 1, 1), "upsample": (1, 1)}, ValueError, "border must have 2 numbers, got (1, 1, 1)"),
    ({"border": "11"}, TypeError, "border must be a tuple of 2 ints, got '11'"),
    ({"upsample": 2}, TypeError, "upsample must be a tuple of 3 ints, got 2"),
    ({"upsample": (2, 2)}, ValueError, "upsample must have 3 numbers, got (2, 2)"),
    ({"norm": "channel"}, TypeError, "norm must be a Norm, a GroupNorm or None, got 'channel'"),
    ({"norm": (None, None)}, TypeError, "norm must be a Norm, a GroupNorm or None, got (None, None)"),
    ({"norm": Norm(added=-1.0)}, ValueError, "added must not be negative, got -1.0"),
    ({"norm": Norm(added=float("nan"))}, ValueError, "added must not be negative, got nan"),
    ({"norm": Norm(scale="2")}, TypeError, "scale must be a number, got '2'"),
    ({"norm": Norm(eps=None)}, TypeError, "eps must be a number, got None"),
    ({"norm": GroupNorm(2, framewise=1)}, TypeError, "framewise must be a bool, got 1"),
    ({"norm": GroupNorm(2, pads_first=0)}, TypeError, "pads_first must be a bool, got 0"),
    # Numbers that are equal to those of a valid call.
    ({"front": 2.0}, TypeError, "front must be an int, got 2.0"),
    ({"window": True}, TypeError, "window must be an int, got True"),
    ({"border": (0, 0.0)}, TypeError, "border must be an int, got 0.0"),
    ({"upsample": (1, 1, 1.0)}, TypeError, "upsample must be an int, got 1.0"),
    ({"norm": Norm(scale=True)}, TypeError, "scale must be a number, got True"),
]


@pytest.mark.drawn(13)
@each_path
@interpreted
@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS)
def test_errors_name_the_call_and_the_value(changes, kind, message, path):
    valid = {"x": ones(1, 6, 2, 3, 4), "front": 2}
    with kernels(direct=True):  # plans of valid calls, which a wrong argument must not find
        for norm in (None, Norm(), GroupNorm(2, framewise=True), GroupNorm(2)):
            pad_frames(**valid, norm=norm)
    with path(), pytest.raises(kind) as caught:
        pad_frames(**{**valid, **changes})
    assert str(caught.value).startswith("sdfastgn.kernels.pad_frames.op.pad_frames: ")
    assert message in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 96, 4, 480, 832), (1, 384, 1, 60, 104), (2, 30, 3, 17, 19)], ids=str)
def test_real_shapes_on_the_gpu(shape, dtype):
    x, cache, norm, shift = video(shape, dtype, "cuda")
    for border in ((0, 0), (1, 1)):
        check(x, cache, front=2, border=border, keep=2, norm=norm, shift=shift)
    for each in (norm, groups(norm, 6)):
        check(x, front=2, border=(1, 1), mode="replicate", norm=each)
    check(x, front=2, border=(1, 1), mode="replicate", shift=shift, norm=groups(norm, 6))
    frames, _ = check(x, cache, front=2, keep=2)
    windows, _ = run(x, cache, front=2, window=3)
    assert torch.equal(windows, torch.cat([frames[:, :, k : k + shape[2]] for k in range(3)], 1))
    if x.numel() < 1e8:
        check(x, front=2, border=(1, 1), mode="replicate", upsample=(2, 2, 2))
