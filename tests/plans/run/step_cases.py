"""For each step, calls of it and the same calls in plain PyTorch."""

import contextlib
import math
from functools import partial

import torch
import torch.nn.functional as F

from sdfastgn.plans.run import steps
from tests.kernels import samples

ACTIVATIONS = {"identity": lambda x: x, "silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def per_channel(t, x):
    return t.view(*t.shape, *[1] * (x.dim() - 2))


def per_sample(t, x):
    return t.view(-1, *[1] * (x.dim() - 1))


def plain_group_norm(x, groups, weight, bias, activation, shift=None, framewise=False):
    x = x if shift is None else x + per_channel(shift, x)
    if not framewise:
        return ACTIVATIONS[activation](F.group_norm(x, groups, weight, bias, 1e-5))
    images = F.group_norm(x.transpose(1, 2).flatten(0, 1), groups, weight, bias, 1e-5)
    return ACTIVATIONS[activation](images.unflatten(0, (len(x), -1)).transpose(1, 2))


def plain_channel_norm(x, weight, bias, scale, eps, activation, added=0.0, shift=None):
    x = x if shift is None else x + per_channel(shift, x)
    length = (x.square().sum(1, keepdim=True) + added).sqrt().clamp(min=eps)
    y = x / length * scale * per_channel(weight, x)
    return ACTIVATIONS[activation](y if bias is None else y + per_channel(bias, x))


def turned(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def plain_ada_norm(x, y, gate, weight, factor, offset):
    total = x + F.rms_norm(y, (12,), weight, 1e-5) * torch.tanh(gate)
    return total, F.layer_norm(total, (12,), weight, weight, 1e-5) * (1 + factor) + offset


def larger(x, times, first_once=False):
    """Repeats elements along the last axes."""
    for axis, count in enumerate(times, x.dim() - len(times)):
        head, tail = (x.narrow(axis, 0, 1), x.narrow(axis, 1, x.shape[axis] - 1)) if first_once else (None, x)
        tail = tail.repeat_interleave(count, axis)
        x = torch.cat((head, tail), axis) if first_once else tail
        first_once = False
    return x


def plain_frames(
    x, cache=None, front=0, back=0, border=(0, 0), mode="zeros", keep=0, times=(1, 1, 1), window=1
):
    x = larger(x, times, first_once=True)
    front -= 0 if cache is None else cache.shape[2]
    x = x if cache is None else torch.cat((cache, x), 2)
    of_frames, of_borders = {
        "zeros": ("constant", "constant"),
        "replicate": ("replicate", "replicate"),
        "reflect": ("replicate", "reflect"),
    }[mode]
    found = F.pad(x, (0, 0, 0, 0, front, back), of_frames)
    y = F.pad(found, (border[1], border[1], border[0], border[0], 0, 0), of_borders)
    count = y.shape[2] - window + 1
    y = torch.cat([y[:, :, k : k + count] for k in range(window)], 1)
    return (y, found[:, :, -keep:]) if keep else (y,)


def in_sevenths(x):
    """Rows that E4M3 holds exactly: a scale is the largest magnitude / 448, which is 7 * 64."""
    sevenths = (x * 3).round().clamp(-7, 7)
    first = torch.arange(x.shape[-1]) == 0
    return sevenths + first * (7 - sevenths)  # in the strides of x, where elements have memory of their own


def signs(x):
    return x - x + torch.where(torch.arange(x.shape[-1]) == 0, 1.0, x.sign()).to(x.dtype)


def linear_e4m3(x, weight, bias):
    return steps.linear_e4m3(*steps.quantize_rows(x), *steps.quantize_weight(weight), bias, x.dtype)


def in_numbers(rows, scales):
    return rows.float() * scales.unsqueeze(-1)


def nested(outer, inner):
    """Filters of 2-D cells, one by one, as Kronecker products."""
    a, b, C = outer.shape[0], *inner.shape[:2]
    rows = [
        [torch.kron(outer[i, j * C + c], inner[j, c]) for c in range(C)] for i in range(a) for j in range(b)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def sums_of_cells(filters, scale):
    """A matrix whose rows are the sums, each of one channel of the cell."""
    r, C, P = *filters.shape[:2], filters[0, 0].numel()
    y = torch.zeros(r, C, P, C, dtype=filters.dtype)
    for c in range(C):
        y[:, c, :, c] = filters[:, c].reshape(r, P) * scale
    return y.reshape(r * C, P * C)


def linears(x, *weights, biases=()):
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True))


def one_by_one(x, weights):
    return steps.conv_last_slice(x, weights, [1, 1, 1], [0, 1, 1], [1, 1, 1], 1)


def after_zeros(x, weight):
    return F.conv3d(F.pad(x, (0, 0, 0, 0, weight.shape[2] - 1, 0)), weight, None, 1, (0, 1, 1))


def by_windows(x, weight):
    side_by_side = steps.frames(x, front=2, border=(1, 1), window=3)[0]
    return steps.conv_windows(side_by_side, weight, [1, 2, 1], [0, 0, 0], [1, 1, 1])


def write_slice(x, part, *where):
    y = x.clone()
    torch.ops.aten.slice.Tensor(y, *where).copy_(part)
    return y


def write_select(x, part, dim, index):
    y = x.clone()
    y.select(dim, index).copy_(part)
    return y


def sdpa(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def norm_of(kind, *args):
    """``frames`` with a norm: of the weight and the bias among its tensors."""

    def run(x, weight, bias, **options):
        first = (3,) if kind is steps.Group else ()
        return steps.frames(x, norm=kind(*first, weight, bias, *args), **options)

    return run


IMAGE, VIDEO, ROWS = (2, 6, 5, 7), (1, 6, 3, 4, 5), (2, 3, 12)
NORM = ((6,), (6,))
# Name -> (shapes of the operands, step, the same in plain PyTorch).
CASES = {
    "reshape-a-view": (
        ((2, 3, 4, 5),),
        lambda x: steps.reshape(x, (2, 12, 5)),
        lambda x: x.reshape(2, 12, 5),
    ),
    "reshape-joins-channels": (
        ((2, 3, 2, 4, 5),),
        lambda x: steps.reshape(x, (2, 6, 4, 5)),
        lambda x: x.reshape(2, 6, 4, 5),
    ),
    "reshape-cuts-channels": (
        ((2, 6, 4, 5),),
        lambda x: steps.reshape(x, (4, 3, 4, 5)),
        lambda x: x.reshape(4, 3, 4, 5),
    ),
    "reshape-joins-samples": (
        ((2, 3, 4, 1, 5),),
        lambda x: steps.reshape(x, (6, 4, 5, 1)),
        lambda x: x.reshape(6, 4, 5, 1),
    ),
    "reshape-to-one-channel": (
        ((3, 4, 5),),
        lambda x: steps.reshape(x, (3, 1, 2, 2, 5)),
        lambda x: x.reshape(3, 1, 2, 2, 5),
    ),
    "reshape-mixes": (
        ((4, 6, 5),),
        lambda x: steps.reshape(x, (3, 5, 2, 4)),
        lambda x: x.reshape(3, 5, 2, 4),
    ),
    "reshape-nothing": (
        ((0, 6, 5),),
        lambda x: steps.reshape(x, (2, 0, 3, 5)),
        lambda x: x.reshape(2, 0, 3, 5),
    ),
    "permute": ((IMAGE,), lambda x: steps.permute(x, (0, 2, 3, 1)), lambda x: x.movedim(1, -1)),
    "expand": (((2, 1, 5),), lambda x: steps.expand(x, (2, 4, 5)), lambda x: x.expand(2, 4, 5)),
    "cut": ((IMAGE,), lambda x: steps.cut(x, 2, 1, 3), lambda x: x[:, :, 1:4]),
    "copy": ((IMAGE,), steps.copy, torch.clone),
    "cast": ((IMAGE,), lambda x: steps.cast(x, torch.float64), torch.Tensor.double),
    "write-slice": (
        ((5, 4), (2, 4)),
        lambda x, y: steps.write_slice_(x, y, 0, 1, 5, 2),
        lambda x, y: write_slice(x, y, 0, 1, 5, 2),
    ),
    "write-select": (
        ((5, 4), (5,)),
        lambda x, y: steps.write_select_(x, y, 1, -1),
        lambda x, y: write_select(x, y, 1, -1),
    ),
    "cat-channels": ((IMAGE, (2, 3, 5, 7)), lambda *x: steps.cat(x, 1), lambda *x: torch.cat(x, 1)),
    "cat-width": ((IMAGE, (2, 6, 5, 2)), lambda *x: steps.cat(x, 3), lambda *x: torch.cat(x, 3)),
    "cat-samples": ((VIDEO, VIDEO), lambda *x: steps.cat(x, 0), lambda *x: torch.cat(x, 0)),
    "cat-frames": ((VIDEO, (1, 6, 1, 4, 5)), lambda *x: steps.cat(x, 2), lambda *x: torch.cat(x, 2)),
    "cat-rows": ((ROWS, ROWS), lambda *x: steps.cat(x, 1), lambda *x: torch.cat(x, 1)),
    **{
        f"pad-{mode}-{len(shape)}": (
            (shape,),
            partial(steps.pad, pads=pads, mode=mode, value=value),
            partial(F.pad, pad=pads, mode=mode, value=value),
        )
        for shape, pads in ((IMAGE, (1, 2, 0, 3)), (VIDEO, (1, 2, 0, 3, 2, 1)))
        for mode, value in (("constant", 2.0), ("replicate", None), ("reflect", None))
    },
    "upsample-2x": ((IMAGE,), lambda x: steps.upsample(x, (2, 2), False), lambda x: larger(x, (2, 2))),
    "upsample-image": ((IMAGE,), lambda x: steps.upsample(x, (1, 3), False), lambda x: larger(x, (1, 3))),
    "upsample-video": (
        (VIDEO,),
        lambda x: steps.upsample(x, (2, 1, 2), False),
        lambda x: larger(x, (2, 1, 2)),
    ),
    "upsample-rows-of-frames": (
        (VIDEO,),
        lambda x: steps.upsample(x, (1, 2, 3), False),
        lambda x: larger(x, (1, 2, 3)),
    ),
    "upsample-first-once": (
        (VIDEO,),
        lambda x: steps.upsample(x, (2, 2, 2), True),
        lambda x: larger(x, (2, 2, 2), True),
    ),
    "pad-copies-of-frames": (
        (VIDEO,),
        lambda x: steps.pad(x, (2, 2, 1, 1, 2, 1), "replicate", 0.0),
        lambda x: F.pad(x, (2, 2, 1, 1, 2, 1), "replicate"),
    ),
    "pad-mirrored-frames": (
        (VIDEO,),
        lambda x: steps.pad(x, (2, 2, 1, 1, 0, 0), "reflect", 0.0),
        lambda x: F.pad(x, (2, 2, 1, 1, 0, 0), "reflect"),
    ),
    "pad-mirrored-video": (
        (VIDEO,),
        lambda x: steps.pad(x, (2, 2, 1, 1, 1, 0), "reflect", 0.0),
        lambda x: F.pad(x, (2, 2, 1, 1, 1, 0), "reflect"),
    ),
    "conv": (
        (IMAGE, (4, 6, 3, 2), (4,)),
        lambda x, w, b: steps.conv(x, w, b, [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
        lambda x, w, b: F.conv2d(x, w, b, (2, 1), (1, 0), (1, 2)),
    ),
    "conv-3d-groups": (
        (VIDEO, (4, 3, 3, 3, 1)),
        lambda x, w: steps.conv(x, w, None, [1] * 3, [1, 1, 0], [1] * 3, False, [0] * 3, 2),
        lambda x, w: F.conv3d(x, w, None, 1, (1, 1, 0), groups=2),
    ),
    "conv-transposed": (
        (IMAGE, (6, 4, 3, 3), (4,)),
        lambda x, w, b: steps.conv(x, w, b, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1),
    ),
    "conv-windows": (
        (VIDEO, (4, 6, 3, 3, 2)),
        by_windows,
        lambda x, w: F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), w, None, (1, 2, 1)),
    ),
    "conv-last-slice": (((2, 6, 1, 4, 5), (3, 6, 3, 3, 3)), one_by_one, after_zeros),
    "pointwise-conv": ((IMAGE, (4, 6, 1, 1), (4,)), steps.pointwise_conv, F.conv2d),
    "pointwise-conv-3d": (
        (VIDEO, (4, 6, 1, 1, 1)),
        lambda x, w: steps.pointwise_conv(x, w, None),
        lambda x, w: F.conv3d(x, w),
    ),
    "upsample-conv": (
        (IMAGE, (4, 6, 3, 3), (4,)),
        lambda x, w, b: steps.upsample_conv(x, w, b, False)[0],
        lambda x, w, b: F.conv2d(larger(x, (2, 2)), w, b, padding=1),
    ),
    "upsample-conv-no-bias": (
        (IMAGE, (4, 6, 3, 3)),
        lambda x, w: steps.upsample_conv(x, w, None, False)[0],
        lambda x, w: F.conv2d(larger(x, (2, 2)), w, None, padding=1),
    ),
    "linear": ((ROWS, (5, 12), (5,)), steps.linear, F.linear),
    "linear-no-bias": ((ROWS, (5, 12)), lambda x, w: steps.linear(x, w, None), F.linear),
    "linears": ((ROWS, (5, 12), (7, 12)), lambda x, *w: tuple(steps.linears(x, w, [])), linears),
    "linears-biases": (
        (ROWS, (5, 12), (7, 12), (5,), (7,)),
        lambda x, a, b, c, d: tuple(steps.linears(x, [a, b], [c, d])),
        lambda x, a, b, c, d: linears(x, a, b, biases=(c, d)),
    ),
    "add-linear": (((2, 3, 5), ROWS, (5, 12)), steps.add_linear_, lambda t, x, w: t + F.linear(x, w)),
    "act-linear": (
        ((3, 12), (5, 12), (5,), (5,)),
        lambda x, w, b, extra: steps.act_linear(x, w, b, "silu", extra),
        lambda x, w, b, extra: F.linear(F.silu(x), w, b) + extra,
    ),
    "act-linear-alone": (
        ((3, 12), (5, 12)),
        lambda x, w: steps.act_linear(x, w, None, "identity", None),
        F.linear,
    ),
    "attention": (
        ((2, 3, 7, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        lambda q, k, v: steps.attention(q, k, v, None, False, None, False),
        sdpa,
    ),
    "attention-mask": (
        ((2, 3, 7, 8), (2, 3, 5, 8), (2, 3, 5, 8), (7, 5)),
        lambda q, k, v, mask: steps.attention(q, k, v, mask, False, 0.3, False),
        partial(sdpa, scale=0.3),
    ),
    "attention-to-first": (
        ((2, 3, 7, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        lambda q, k, v: steps.attention_to_first(q, k, v, torch.tensor([3]), 0.3, False),
        lambda q, k, v: sdpa(q, k[:, :, :3], v[:, :, :3], scale=0.3),
    ),
    "attention-to-first-of-samples": (
        ((2, 3, 7, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        lambda q, k, v: steps.attention_to_first(q, k, v, torch.tensor([2, 4]), None, False),
        lambda q, k, v: torch.cat(
            [sdpa(q[i:][:1], k[i:][:1, :, :n], v[i:][:1, :, :n]) for i, n in ((0, 2), (1, 4))]
        ),
    ),
    "attention-to-first-without-heads": (
        ((2, 7, 8), (2, 5, 8), (2, 5, 8)),
        lambda q, k, v: steps.attention_to_first(q, k, v, torch.tensor([1]), None, False),
        lambda q, k, v: sdpa(q, k[:, :1], v[:, :1]),
    ),
    "attention-causal": (
        ((2, 3, 7, 8),) * 3,
        lambda q, k, v: steps.attention(q, k, v, None, True, None, False),
        partial(sdpa, is_causal=True),
    ),
    "attention-of-few-tokens": (
        ((70, 2, 3, 8),) * 3,
        lambda q, k, v: steps.attention(q, k, v, None, True, 0.3, False),
        partial(sdpa, is_causal=True, scale=0.3),
    ),
    "attention-groups": (
        ((2, 4, 7, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
        lambda q, k, v: steps.attention(q, k, v, None, False, None, True),
        partial(sdpa, enable_gqa=True),
    ),
    "attention-wider-values": (
        ((2, 3, 7, 8), (2, 3, 5, 8), (2, 3, 5, 16)),
        lambda q, k, v: steps.attention(q, k, v, None, False, None, False),
        sdpa,
    ),
    "attention-without-heads": (
        ((2, 7, 8), (2, 5, 8), (2, 5, 8)),
        lambda q, k, v: steps.attention(q, k, v, None, False, None, False),
        sdpa,
    ),
    "group-norm": (
        (IMAGE, *NORM),
        lambda x, w, b: steps.group_norm(x, 3, w, b, 1e-5, "silu", None, None, False),
        lambda x, w, b: plain_group_norm(x, 3, w, b, "silu"),
    ),
    "group-norm-shift": (
        (IMAGE, *NORM, (2, 6)),
        lambda x, w, b, s: steps.group_norm(x, 2, w, b, 1e-5, "identity", s, None, False),
        lambda x, w, b, s: plain_group_norm(x, 2, w, b, "identity", s),
    ),
    "group-norm-ada": (
        (IMAGE, *NORM, (1, 6), (2, 6)),
        lambda x, w, b, s, t: steps.group_norm(x, 2, w, b, 1e-5, "silu", None, None, False, s, t),
        lambda x, w, b, s, t: F.silu(
            plain_group_norm(x, 2, w, b, "identity") * (1 + per_channel(s, x)) + per_channel(t, x)
        ),
    ),
    "group-norm-alone": (
        (VIDEO,),
        lambda x: steps.group_norm(x, 2, None, None, 1e-5, "gelu", None, None, False),
        lambda x: plain_group_norm(x, 2, None, None, "gelu"),
    ),
    "group-norm-framewise": (
        (VIDEO, *NORM, (6,)),
        lambda x, w, b, s: steps.group_norm(x, 3, w, b, 1e-5, "silu", s, None, True),
        lambda x, w, b, s: plain_group_norm(x, 3, w, b, "silu", s, True),
    ),
    "group-norm-framewise-ada": (
        (VIDEO, *NORM, (3, 6)),
        lambda x, w, b, s: steps.group_norm(x, 3, w, b, 1e-5, "identity", None, None, True, s),
        lambda x, w, b, s: (
            plain_group_norm(x, 3, w, b, "identity", None, True) * (1 + s.t().view(1, 6, 3, 1, 1))
        ),
    ),
    "modulated-norm": (
        ((1, 6, 3, 4, 6), *NORM, (1, 12, 2, 2, 3)),
        lambda x, w, b, m: steps.modulated_norm(x, 3, w, b, 1e-5, "silu", m),
        lambda x, w, b, m: F.silu(
            plain_group_norm(x, 3, w, b, "identity") * larger(m, (2, 2, 2), True)[:, :6]
            + larger(m, (2, 2, 2), True)[:, 6:]
        ),
    ),
    "modulated-norm-of-an-image": (
        ((2, 6, 4, 6), *NORM, (2, 12, 2, 3)),
        lambda x, w, b, m: steps.modulated_norm(x, 3, w, b, 1e-5, "identity", m),
        lambda x, w, b, m: (
            plain_group_norm(x, 3, w, b, "identity") * larger(m, (2, 2))[:, :6] + larger(m, (2, 2))[:, 6:]
        ),
    ),
    "channel-norm": (
        (IMAGE, *NORM),
        lambda x, w, b: steps.channel_norm(x, w, b, 2.0, 1e-6, "silu", 0.0),
        lambda x, w, b: plain_channel_norm(x, w, b, 2.0, 1e-6, "silu"),
    ),
    **{
        f"channel-norm-rms-{len(shape)}": (
            (shape, (6,), (6,)),
            lambda x, w, s: steps.channel_norm(x, w, None, math.sqrt(6), 0.0, "silu", 6e-3, s),
            lambda x, w, s: plain_channel_norm(x, w, None, math.sqrt(6), 0.0, "silu", 6e-3, s),
        )
        for shape in ((2, 6, 5), IMAGE, VIDEO)
    },
    "padded-cat": (
        (VIDEO, VIDEO),
        lambda x, y: steps.padded_cat((x[:, :, :1], y), 2, (0, 1, 2, 0, 1, 3), 0.5),
        lambda x, y: F.pad(torch.cat((x[:, :, :1], y), 2), (0, 1, 2, 0, 1, 3), value=0.5),
    ),
    "padded-cat-of-channels": (
        (IMAGE, IMAGE),
        lambda x, y: steps.padded_cat((x, y), 1, (0, 1, 2, 0), 0.0),
        lambda x, y: F.pad(torch.cat((x, y), 1), (0, 1, 2, 0)),
    ),
    "mean-windows": (
        ((2, 6, 4, 3, 5),),
        lambda x: steps.mean_windows(x, 2, 2),
        lambda x: x.unflatten(2, (2, 2)).mean(3),
    ),
    "mean-windows-of-rows": (
        (ROWS,),
        lambda x: steps.mean_windows(x, 2, 3),
        lambda x: F.avg_pool1d(x, 3),
    ),
    "frames-zeros": (
        (VIDEO, (1, 6, 1, 4, 5)),
        partial(steps.frames, front=2, back=1, border=(1, 2), keep=2),
        partial(plain_frames, front=2, back=1, border=(1, 2), keep=2),
    ),
    "frames-reflect": (
        (VIDEO,),
        lambda x: steps.frames(x, front=2, border=(2, 1), mode="reflect")[:1],
        lambda x: plain_frames(x, front=2, border=(2, 1), mode="reflect"),
    ),
    "frames-replicate-upsampled": (
        (VIDEO,),
        partial(steps.frames, front=1, back=2, border=(1, 0), mode="replicate", keep=1, times=(2, 2, 1)),
        partial(plain_frames, front=1, back=2, border=(1, 0), mode="replicate", keep=1, times=(2, 2, 1)),
    ),
    "frames-group-norm": (
        (VIDEO, *NORM),
        lambda x, w, b: norm_of(steps.Group, 1e-5, "silu")(x, w, b, front=2, mode="replicate")[0],
        lambda x, w, b: plain_frames(plain_group_norm(x, 3, w, b, "silu"), front=2, mode="replicate")[0],
    ),
    "frames-padded-group-norm": (
        (VIDEO, *NORM),
        lambda x, w, b: steps.frames(
            x,
            front=2,
            back=1,
            mode="replicate",
            norm=steps.Group(3, w, b, 1e-5, "silu", pads_first=True),
        )[0],
        lambda x, w, b: plain_group_norm(
            plain_frames(x, front=2, back=1, mode="replicate")[0], 3, w, b, "silu"
        ),
    ),
    "frames-channel-norm-window": (
        (VIDEO, *NORM),
        lambda x, w, b: norm_of(steps.Channel, 2.0, 1e-6, "silu", 0.5)(x, w, b, front=2, window=3)[0],
        lambda x, w, b: plain_frames(plain_channel_norm(x, w, b, 2.0, 1e-6, "silu", 0.5), front=2, window=3)[
            0
        ],
    ),
    "add": (
        (IMAGE, IMAGE, (6,)),
        lambda h, r, b: steps.add(h, r, b, 1.5, False)[0],
        lambda h, r, b: (h + r + per_channel(b, h)) / 1.5,
    ),
    "add-per-sample": (
        (IMAGE, IMAGE, (2, 6)),
        lambda h, r, b: steps.add(h, r, b, 1.0, False)[0],
        lambda h, r, b: h + r + per_channel(b, h),
    ),
    "add-activated": (
        (IMAGE, IMAGE, (6,)),
        lambda h, r, b: steps.add(h, r, b, 1.5, False, "silu")[0],
        lambda h, r, b: F.silu((h + r + per_channel(b, h)) / 1.5),
    ),
    "add-activated-nothing": (
        ((0, 6, 5, 7),) * 2,
        lambda h, r: steps.add(h, r, None, 1.0, False, "gelu")[0],
        lambda h, r: F.gelu(h + r),
    ),
    "add-videos": ((VIDEO, VIDEO), lambda h, r: steps.add(h, r, None, 1.0, False)[0], torch.add),
    "add-nothing": (((0, 6, 5, 7),) * 2, lambda h, r: steps.add(h, r, None, 1.0, False)[0], torch.add),
    "conv-relu": (
        (IMAGE, (4, 6, 3, 2), (4,)),
        lambda x, w, b: steps.conv_relu(x, w, b, None, [1, 2], [1, 0], [2, 1], 1),
        lambda x, w, b: F.relu(F.conv2d(x, w, b, (1, 2), (1, 0), (2, 1))),
    ),
    "conv-relu-residual": (
        (IMAGE, (6, 3, 3, 3), (6,), IMAGE),
        lambda x, w, b, r: steps.conv_relu(x, w, b, r, [1, 1], [1, 1], [1, 1], 2),
        lambda x, w, b, r: F.relu(F.conv2d(x, w, b, padding=1, groups=2) + r),
    ),
    "blend": (
        (IMAGE, IMAGE, (6,), (2,), (2,)),
        lambda h, r, b, k, s: steps.blend(h, r, b, k, s, False)[0],
        lambda h, r, b, k, s: per_sample(k, r) * r + per_sample(s, h) * (h + per_channel(b, h)),
    ),
    "blend-videos": (
        (VIDEO, VIDEO, (1,), (1,)),
        lambda h, r, k, s: steps.blend(h, r, None, k, s, False)[0],
        lambda h, r, k, s: k * r + s * h,
    ),
    "blend-nothing": (
        ((0, 6, 5, 7), (0, 6, 5, 7), (0,), (0,)),
        lambda h, r, k, s: steps.blend(h, r, None, k, s, False)[0],
        lambda h, r, k, s: h,
    ),
    "nested-filters": (((2, 6, 2, 3), (3, 2, 4, 1)), steps.nested_filters, nested),
    "matrix-of-cells": (
        ((3, 2, 2, 4),),
        lambda f: steps.matrix_of_cells(f, 0.5, f.dtype, False),
        lambda f: sums_of_cells(f, 0.5),
    ),
    "matrix-of-cells-transposed": (
        ((2, 3, 2, 1, 2),),
        lambda f: steps.matrix_of_cells(f, 2.0, f.dtype, True),
        lambda f: sums_of_cells(f, 2.0).T,
    ),
    "add-moved": (
        ((2, 3, 4, 2, 5, 1), (2, 1, 4, 2, 1, 3)),
        lambda a, b: steps.add_views(*torch.broadcast_tensors(a, b), (2, 3, 8, 15)),
        lambda a, b: (a + b).reshape(2, 3, 8, 15),
    ),
    "add-moved-frames": (
        ((1, 3, 2, 4, 2, 5), (1, 2, 3, 2, 5, 4)),
        lambda a, b: steps.add_views(a, b.permute(0, 2, 1, 5, 3, 4), (1, 3, 8, 2, 5)),
        lambda a, b: (a + b.permute(0, 2, 1, 5, 3, 4)).reshape(1, 3, 8, 2, 5),
    ),
    "add-bias": (
        (IMAGE, (6,)),
        lambda h, b: steps.add_bias_(h, b, False)[0],
        lambda h, b: h + per_channel(b, h),
    ),
    "add-bias-activated": (
        (IMAGE, (6,)),
        lambda h, b: steps.add_bias_(h, b, False, "mish")[0],
        lambda h, b: F.mish(h + per_channel(b, h)),
    ),
    "add-bias-activated-nothing": (
        ((0, 6, 5, 7), (6,)),
        lambda h, b: steps.add_bias_(h, b, False, "gelu_tanh")[0],
        lambda h, b: F.gelu(h + per_channel(b, h), approximate="tanh"),
    ),
    "add-bias-nothing": (
        ((0, 6, 5, 7), (6,)),
        lambda h, b: steps.add_bias_(h, b, False)[0],
        lambda h, b: h + per_channel(b, h),
    ),
    "add-no-bias-activated": (
        (IMAGE,),
        lambda h: steps.add_bias_(h, None, False, "relu")[0],
        lambda h: h.relu(),
    ),
    "add-no-bias": ((IMAGE,), lambda h: steps.add_bias_(h, None, True)[0], lambda h: h),
    "cat-two": (
        (IMAGE, (2, 3, 5, 7)),
        lambda a, b: steps.cat_two(a, b, False)[0],
        lambda a, b: torch.cat((a, b), 1),
    ),
    "cat-two-nothing": (
        (IMAGE, (2, 0, 5, 7)),
        lambda a, b: steps.cat_two(a, b, False)[0],
        lambda a, b: torch.cat((a, b), 1),
    ),
    "layer-norm": (
        (ROWS, (12,), (12,)),
        lambda x, w, b: steps.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (12,), w, b),
    ),
    "layer-norm-alone": (
        (ROWS,),
        lambda x: steps.layer_norm(x, None, None, 1e-5),
        lambda x: F.layer_norm(x, (12,)),
    ),
    "add-layer-norm": (
        (ROWS, ROWS, (12,), (12,), (12,)),
        lambda a, b, w, c, d: steps.add_layer_norm(a, b, w, c, 1e-5, d),
        lambda a, b, w, c, d: (F.layer_norm(a + b, (12,), w, c), a + b + d),
    ),
    "grouped-layer-norm": (
        ((2, 6, 12), (2, 6, 12), (2, 12), (12,), (12,), (12,)),
        lambda a, b, rows, w, c, d: steps.grouped_layer_norm(a, b, rows, 3, w, c, 1e-5, d),
        lambda a, b, rows, w, c, d: (
            F.layer_norm(u := a + b + rows.repeat_interleave(3, 0), (12,), w, c),
            u + d,
        ),
    ),
    "grouped-layer-norm-alone": (
        ((2, 6, 12), (2, 12)),
        lambda a, rows: steps.grouped_layer_norm(a, None, rows, 6, None, None, 1e-5, None),
        lambda a, rows: (F.layer_norm(u := a + rows[:, None], (12,)), u),
    ),
    "ada-norm": (
        ((2, 5, 12), (2, 5, 12), (2, 1, 12), (12,), (1, 5, 12), (2, 5, 12)),
        lambda x, y, g, w, f, o: steps.ada_norm(
            x, y, g, ("rms", w, None, 1e-5), ("layer", w, w, 1e-5), f, o, True, True, True
        ),
        plain_ada_norm,
    ),
    "ada-norm-sum": (
        ((2, 5, 12), (2, 5, 12), (2, 1, 12)),
        lambda x, y, g: steps.ada_norm(x, y, g, None, None, None, None, False, False, True)[:1],
        lambda x, y, g: (x + y * g,),
    ),
    "ada-norm-bias": (
        ((2, 5, 12), (2, 5, 12), (2, 1, 12), (12,)),
        lambda x, y, g, b: steps.ada_norm(
            x, y, g, ("none", None, b, 0.0), None, None, None, False, False, True
        )[:1],
        lambda x, y, g, b: (x + (y + b) * g,),
    ),
    "ada-norm-alone": (
        ((2, 5, 12), (12,), (2, 1, 12)),
        lambda x, w, f: steps.ada_norm(
            x, None, None, None, ("rms", w, None, 1e-5), f, None, False, False, False
        )[1:],
        lambda x, w, f: (F.rms_norm(x, (12,), w, 1e-5) * f,),
    ),
    "linear-gelu": (
        ((2, 3, 12), (6, 12), (6,)),
        steps.linear_gelu,
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
    ),
    "linear-e4m3": (
        ((2, 3, 32), (16, 32), (16,)),
        lambda x, w, b: linear_e4m3(in_sevenths(x), in_sevenths(w), b),
        lambda x, w, b: F.linear(in_sevenths(x), in_sevenths(w), b),
    ),
    "quantize-rows": (
        ((2, 3, 2, 4), (2, 3, 2, 5)),
        lambda x, y: in_numbers(*steps.quantize_rows(in_sevenths(x), "relu", in_sevenths(y))),
        lambda x, y: torch.cat((F.relu(in_sevenths(x)), in_sevenths(y)), -1),
    ),
    "quantize-gated": (
        ((2, 3, 2, 4), (2, 3, 2, 4)),
        lambda x, y: in_numbers(*steps.quantize_rows(signs(x), "relu", in_sevenths(y), "identity", True)),
        lambda x, y: F.relu(signs(x)) * in_sevenths(y),
    ),
    "rotate": (
        ((2, 3, 4, 6), (1, 3, 1, 6), (2, 1, 4, 6)),
        steps.rotate,
        lambda x, c, s: turned(x, c, s),
    ),
    "rotate-complex": (
        ((2, 3, 4, 6), (1, 3, 1, 3), (1, 3, 1, 3)),
        lambda x, a, b: steps.rotate(x, torch.complex(a, b), None),
        lambda x, a, b: torch.view_as_real(
            torch.view_as_complex(x.reshape(2, 3, 4, 3, 2).contiguous()) * torch.complex(a, b)
        ).flatten(-2),
    ),
    "gated-rows": ((ROWS, ROWS), partial(steps.gated, activation="silu"), lambda a, b: a * F.silu(b)),
    "gated-images": ((IMAGE, IMAGE), partial(steps.gated, activation="gelu"), lambda a, b: a * F.gelu(b)),
    "rotate-norm": (
        ((2, 3, 4, 6), (1, 3, 1, 6), (2, 1, 4, 6), (6,)),
        lambda x, c, s, w: steps.rotate(x, c, s, w, 1e-5),
        lambda x, c, s, w: turned(F.rms_norm(x, (6,), w, 1e-5), c, s),
    ),
    "rotate-halves": (
        ((2, 3, 4, 6), (1, 3, 1, 6), (2, 1, 4, 6)),
        partial(steps.rotate, halves=True),
        lambda x, c, s: x * c + torch.cat((-x[..., 3:], x[..., :3]), -1) * s,
    ),
    "rotate-layer-norm": (
        ((2, 3, 4, 6), (1, 3, 1, 6), (2, 1, 4, 6), (6,)),
        lambda x, c, s, w: steps.rotate(x, c, s, None, 1e-5, False, w, True),
        lambda x, c, s, w: turned(F.layer_norm(x, (6,), None, w, 1e-5), c, s),
    ),
    "join-heads": (
        ((2, 3, 4, 6), (2, 5, 4, 6), (2, 1, 4, 6), (1, 3, 1, 6), (1, 5, 1, 3), (6,)),
        lambda x, y, z, c, h, w: steps.join_heads(
            (
                (x, c, c, w, 1e-5, False, None, False),
                (y, torch.complex(h, h), None, None, 0.0, False, None, False),
                (z, None, None, w, 1e-5, False, None, False),
            )
        ),
        lambda x, y, z, c, h, w: torch.cat(
            (
                turned(F.rms_norm(x, (6,), w, 1e-5), c, c),
                turned(y, *[h.repeat_interleave(2, -1)] * 2),
                F.rms_norm(z, (6,), w, 1e-5),
            ),
            1,
        ),
    ),
}
WRITERS = ("write-slice", "write-select", "add-linear", "add-bias")
PLACES = {
    "channels-first": lambda t: t,
    "channels-last": samples.channels_last,
    "strided": samples.every_second,
    "expanded": samples.expanded,
}
PATHS = {
    "fp32": (torch.float32, contextlib.nullcontext),
    "fp64": (torch.float64, contextlib.nullcontext),
    "kernels": (torch.float32, partial(samples.kernels, direct=True)),
}
