"""Steps of images and videos: norms, convolutions, cells, pools and residual blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.plans.program_steps.parts import (
    ANY,
    IMAGES,
    LAST_NORMS,
    SPATIAL,
    VIDEOS,
    activated,
    cast,
    channels,
    convolved,
    grouped,
    ones,
    per_channel,
    roots,
    step,
)
from tests.plans.programs import Program

# ---- norms


@step(SPATIAL, 4)
def group_norm(p: Program, x: str) -> None:
    y = p.let(grouped(p, x))
    if p.chance(0.1):
        p.add(y)
    if p.chance(0.15):
        y = p.let(cast(p, y))
    if p.chance(0.1):
        p.do(f"F.silu({y}, inplace=True)")
        p.add(y)
        return
    y = p.add(activated(p, y))
    if p.chance(0.4):
        p.add(convolved(p, y))


@step(SPATIAL, 3)
def norm_of_channels(p: Program, x: str) -> None:
    rank = p.value(x).dim()
    if p.chance(0.4):
        axis = 1 if p.chance(0.85) else 2
        y = p.let(roots(p, x, axis))
        y = _scaled(p, y, lambda: per_channel(p, x))
    else:
        v = p.let(
            f"{x}.movedim(1, -1)"
            if p.chance(0.8)
            else f"{x}.permute(0, {', '.join(map(str, range(2, rank)))}, 1)"
        )
        size = p.shape(v)[-1]
        rest = {"w": p.tensor(size), "b": p.tensor(size), "last": p.shape(v)[-2:], "C": size}
        norm = roots(p, v, -1) if p.chance(0.4) else p.one_of(LAST_NORMS, v=v, **rest)
        v = _scaled(p, p.let(norm), lambda: p.tensor(size))
        v = activated(p, v, 0.3)
        y = p.let(f"({v}).movedim(-1, 1)")
    y = p.add(activated(p, y))
    if p.chance(0.3):
        p.add(convolved(p, y))


def _scaled(p: Program, y: str, operand: Callable[[], str]) -> str:
    """``y`` times and plus operands of each channel, in several orders."""
    w, b = operand(), operand()
    if p.chance(0.1):
        p.add(y)
    if p.chance(0.1):
        y = p.let(cast(p, y))
    return p.let(
        p.choice(
            y, f"{y} * {w}", f"{y} * {w}", f"{w} * {y}", f"{y} * {w} + {b}", f"{b} + {y} * {w}",
            f"({y} * {w} + {b}) * 0.5", f"({y} + {b}) * {w}", f"{y} * 0.5 * {w}", f"{y} * (1 + {w})",
            f"{y} * {w} * {b}", f"{y} * {w} - {b}", f"{y} + {b} + {b}", f"torch.add({y} * {w}, {b}, alpha=2)",
        )
    )  # fmt: skip


OF_EMBEDDINGS = """
{y} * (1 + {scale}) + {shift}
{y} * (1 + {scale}) + {shift}
{y} * (1 + {scale}) + {shift}
{shift} + ({scale} + 1.0) * {y}
{y} * (1 + {scale})
{y} + {shift}
{y} * {scale} + {shift}
({y} + {shift}) * {scale}
({y} + {shift}) * (1 + {scale})
{y} * (1 + {scale}) * (1 + {shift})
{y} * (1 + {scale}) + {shift} + {scale}
{y} * (2 + {scale}) + {shift}
{y} * (1 - {scale}) - {shift}
F.silu({y}) * (1 + {scale}) + {shift}
({y} * (1 + {scale})).to(torch.bfloat16).to({y}.dtype) + {shift}
{y} * (1 + {scale}.transpose(1, -1)) + {shift}
"""


@step(SPATIAL)
def modulated_by_embedding(p: Program, x: str) -> None:
    """A norm, times and plus what an embedding says for each sample, or for each frame as an image."""
    shape = p.shape(x)
    as_images, as_video = ".transpose(1, 2).flatten(0, 1)", f".unflatten(0, {shape[::2][:2]}).transpose(1, 2)"
    first, before, after = "", "", ""
    if len(shape) == 5 and p.chance(0.4):
        first, before, after = p.choice((as_images, "", as_video), (as_images, as_video, ""))
    y = p.let(f"{grouped(p, p.let(x + first))}{before}")
    N, C = p.shape(y)[:2]
    e = f"F.silu({p.tensor(p.choice(1, N, N), 6)})"
    e = p.let(f"F.linear({e}, {p.tensor(2 * C, 6, scale=0.4)}, {p.tensor(2 * C)}){ones(p, y)}")
    scale, shift = p.let(f"{e}[:, :{C}]"), p.let(f"{e}[:, {C}:]")
    if p.chance(0.1):
        p.add(y)
    y = p.let(activated(p, p.let(p.one_of(OF_EMBEDDINGS, y=y, scale=scale, shift=shift))))
    y = p.let(y + after)
    p.add(convolved(p, y) if p.chance(0.3) else y)


OTHER_NORMS = """
F.silu(F.group_norm({x}.flatten(2), 2)).reshape{shape}
F.group_norm({x}.flatten(2), 2).view{shape}
F.group_norm({x}.flatten(2).transpose(1, 2), 1).transpose(1, 2).reshape{shape}
F.group_norm({x}.reshape(1, {NC}, -1), 2).reshape{shape}
F.group_norm({x}.reshape({NC}, 1, -1), 1).reshape{shape}
F.silu(F.group_norm({x}.permute({swap}).reshape({C}, {N}, -1), 1).reshape{turned}.permute({swap}))
F.silu(F.group_norm({x}.permute({swap}), 1)).permute({swap})
torch.cat([F.group_norm(v, 2) for v in {x}.split(1)])
torch.cat([F.group_norm(v, 2) for v in {x}.split(1)][::-1])
torch.cat([F.group_norm(v, 2, {w}, {b}) for v in {x}.split(1, 2)], 2)
F.instance_norm({x})
F.group_norm({x}.transpose(2, 3), 2).transpose(2, 3)
F.batch_norm({x}, {mean}, {var}, {w}, {b})
"""


@step(SPATIAL)
def norm_of_other_views(p: Program, x: str) -> None:
    """GroupNorms of reshaped, transposed and split tensors."""
    N, C, *size = shape = p.shape(x)
    names = {"shape": shape, "N": N, "C": C, "NC": N * C, "turned": (C, N, *size)}
    names |= {"swap": (1, 0, *range(2, len(shape))), "mean": p.tensor(C), "var": f"{p.tensor(C)}.abs() + 1"}
    p.add(p.one_of(OTHER_NORMS, x=x, w=p.tensor(C), b=p.tensor(C), **names))


# ---- convolutions


@step(SPATIAL, 3)
def conv(p: Program, x: str) -> None:
    y = p.let(convolved(p, x))
    if p.chance(0.12):
        y = p.let(p.choice(f"{y} * 0.5", f"{y} / 1.0", f"{y} + {per_channel(p, y)}", cast(p, y)))
    if p.chance(0.5):
        y = p.let(activated(p, p.let(grouped(p, y))))
    p.add(y)


@step(SPATIAL)
def unusual_conv(p: Program, x: str) -> None:
    C, rank = channels(p, x), p.value(x).dim()
    options: list[dict[str, Any]] = [
        {"stride": 2}, {"dilation": 2, "padding": 2}, {"padding": 0, "kernel": 1}, {"padding": 2},
        {"padding": 1, "kernel": 1}, {"padding": "'same'"}, {"kernel": (1,) * (rank - 3) + (3,)},
        {"kernel": (3,) + (1,) * (rank - 3)},
    ]  # fmt: skip
    kind = p.random.randrange(len(options) + 3)
    if kind < len(options):
        p.add(convolved(p, x, **{"kernel": 3, **options[kind]}))
    elif kind == len(options):
        w = p.tensor(C, 1, *[3] * (rank - 2), scale=0.3, last=p.chance(0.5))
        p.add(f"F.conv{rank - 2}d({x}, {w}, {p.tensor(C)}, padding=1, groups={C})")
    elif kind == len(options) + 1:
        w = p.tensor(C, C, *[2] * (rank - 2), scale=0.3 / C**0.5)
        p.add(f"F.conv_transpose{rank - 2}d({x}, {w}, {p.tensor(C)}, stride=2)")
    else:
        w = p.tensor(C, C, 3, scale=0.5 / C**0.5)
        y = p.let(f"F.conv1d({x}.flatten(2), {w}, {p.tensor(C)}, padding=1)")
        p.add(f"{y}.reshape({p.shape(x)})")


@step(IMAGES, 2)
def padded_conv(p: Program, x: str) -> None:
    pads = p.choice((1, 1, 1, 1), (1, 1, 1, 1), (0, 1, 0, 1), (2, 2, 1, 1), (1, 1, -1, -1), (1, 1))
    how = p.choice("", "", ", value=1.0", ", mode='replicate'", ", mode='reflect'", ", mode='circular'")
    if min(pads) < 0 or len(pads) == 2:
        how = ""
    y = p.let(f"F.pad({x}, {pads}{how})")
    if p.chance(0.15):
        p.add(y)
    if p.chance(0.15):
        y = p.let(f"F.pad({y}, (1, 0, 0, 1))")
    p.add(convolved(p, y, kernel=3, padding=p.choice(0, 0, 1), stride=p.choice(1, 1, 2)))


UPSAMPLED = """
F.interpolate({x}, scale_factor=2.0, mode='nearest')
F.interpolate({x}, scale_factor=2.0, mode='nearest')
F.interpolate({x}, scale_factor=2.0, mode='nearest')
F.interpolate({x}, scale_factor=3.0, mode='nearest')
F.interpolate({x}, scale_factor=2.0, mode='nearest-exact')
F.interpolate({x}, scale_factor=2.0, mode='bilinear')
F.interpolate({x}, size={twice}, mode='nearest')
F.interpolate({x}, size={more}, mode='nearest')
F.interpolate({x}, scale_factor={flat}, mode='nearest')
F.interpolate({x}.float(), scale_factor=2.0, mode='nearest').to({x}.dtype)
{x}.repeat_interleave(2, -1).repeat_interleave(2, -2)
{x}.repeat_interleave(2, 2)[:, :, 1:]
{x}.repeat_interleave(2, -1)[:, :, {start}:]
"""


@step(SPATIAL, 3)
def upsampled(p: Program, x: str) -> None:
    rank, size = p.value(x).dim(), p.shape(x)[2:]
    if math.prod(p.shape(x)) > 1500:
        return
    twice, more = tuple(2 * s for s in size), tuple(s + 3 for s in size)
    names = {"twice": twice, "more": more, "flat": (1.0, 2.0, 2.0)[5 - rank :], "start": p.choice(0, 1)}
    y = p.let(p.one_of(UPSAMPLED, x=x, **names))
    if p.chance(0.15):
        p.add(y)
    if p.chance(0.85):
        padding = {"padding": 0} if p.chance(0.1) else {}
        y = p.let(convolved(p, y, kernel=3, out=channels(p, x), **padding))
        if p.chance(0.15):
            p.add(y)
    p.add(grouped(p, y) if p.chance(0.4) else y)


@step(SPATIAL)
def shuffled(p: Program, x: str) -> None:
    """Pixels become channels, or channels become pixels."""
    N, C, *size = p.shape(x)
    y = p.let(activated(p, p.let(grouped(p, x)), 0.5))
    if len(size) == 2 and C % 4 == 0:
        H, W = size
        by_hand = f"{y}.reshape({N}, {C // 4}, 2, 2, {H}, {W}).permute(0, 1, 4, 2, 5, 3)"
        small = p.choice(f"F.pixel_shuffle({y}, 2)", f"{by_hand}.reshape({N}, {C // 4}, {2 * H}, {2 * W})")
        p.add(
            f"F.pixel_unshuffle({small}, 2)" if p.chance(0.5) else convolved(p, p.let(small), kernel=3, out=C)
        )
    elif len(size) == 3:
        y = p.let(f"{y}.reshape({N}, {C // 2}, 2, {', '.join(map(str, size))}).permute(0, 1, 3, 2, 4, 5)")
        p.add(f"{y}.reshape({N}, {C // 2}, {2 * size[0]}, {size[1]}, {size[2]}).repeat(1, 2, 1, 1, 1)")


def _cells(p: Program, y: str) -> tuple[str, tuple[int, ...]]:
    """``y`` with channels as positions, and how many positions a cell has along each axis."""
    N, C, *size = p.shape(y)
    d = len(size)
    cell = p.choice((2, 2), (2, 1)) if d == 2 else p.choice((1, 2, 2), (2, 2, 2), (2, 1, 1), (1, 2, 1))
    small = C // math.prod(cell)
    places = [axis for i in range(d) for axis in (2 + d + i, 2 + i)]
    if p.chance(0.15):
        places[0], places[1] = places[1], places[0]  # positions of a cell beside those of other cells
    if p.chance(0.7):
        parts, order = (N, small, *cell, *size), (0, 1, *places)
    else:
        parts, order = (N, *cell, small, *size), (0, 1 + d, *(a - (a < 2 + d) for a in places))
    larger = tuple(s * c for s, c in zip(size, cell, strict=True))
    return f"{y}.reshape({parts}).permute({order}).reshape({(N, small, *larger)})", cell


@step(SPATIAL, 6)
def moved_to_positions(p: Program, x: str) -> None:
    """Channels become positions, often with a bias before or a sum after."""
    y = p.let(convolved(p, x)) if p.chance(0.5) else x
    if channels(p, x) % 8 or channels(p, y) % 8 or math.prod(p.shape(x)) > 2000:
        return
    text, cell = _cells(p, y)
    z = p.let(text)
    frames, start = p.shape(z)[2], p.choice(0, cell[0], 1)
    part, alike = "", ""  # two parts of the same number of frames
    if 0 < start < frames:
        ends = (f"[:, :, {start}:]", f"[:, :, :{frames - start}]")
        part, alike = p.choice(ends, ends[::-1])
    if p.chance(0.7):
        shortcut = f"{x}.repeat_interleave(2, 1)" if p.chance(0.3) else x
        repeated = f"{_cells(p, x)[0]}.repeat(1, {p.choice(1, 2, 4)}{', 1' * (len(p.shape(x)) - 2)})"
        other = p.choice(_cells(p, shortcut)[0], repeated, text.replace(y, x, 1), p.tensor(*p.shape(z)))
        if p.shape(p.let(other)) != p.shape(z):
            other = p.tensor(*p.shape(z), kind="x")
        w = p.let(p.choice(other, other, f"{other}.to({z}.dtype)", f"{other}.double()"))
        v = p.choice(part, part, alike)
        if p.chance(0.1):
            p.add(z)
        y = p.choice(
            f"{z}{part} + {w}{v}", f"{z}{part} + {w}{v}", f"{w}{v} + {z}{part}", f"{z} + {w}",
            f"torch.add({z}, {w}, alpha=2)", f"{z} + {w}[:, :1]", f"{z} + {z}",
        )  # fmt: skip
        y = p.add(y)
        if p.chance(0.3):
            p.add(grouped(p, y))
    else:
        z = p.let(f"{z}{part}")
        p.add(p.choice(z, f"{z} * 2", f"F.silu({z})", f"{z}.flatten(1, 2)[..., None]"))


@step(SPATIAL, 2)
def means_of_cells(p: Program, x: str) -> None:
    """Positions become channels, of which some are averaged; means of channels or of positions."""
    N, C, *size = shape = p.shape(x)
    d = len(size)
    cell = tuple(p.choice(2, 2, 1) if s % 2 == 0 else 1 for s in size)
    split = [n for s, c in zip(size, cell, strict=True) for n in (s // c, c)]
    order = (0, 1, *range(3, 3 + 2 * d, 2), *range(2, 2 + 2 * d, 2))
    if p.chance(0.2):
        order = (0, *order[2 : 2 + d], 1, *order[2 + d :])  # cells before channels
    all_channels = C * math.prod(cell)
    groups = p.choice(*[g for g in (1, 2, 4, 8) if all_channels % g == 0])
    parts = (N, all_channels // groups, groups, *split[::2])
    cells = f"{x}.reshape({(N, C, *split)}).permute({order}).reshape({parts})"
    y = p.choice(
        f"{cells}.mean(2)", f"{cells}.mean(2)", f"{cells}.mean(1)", f"{cells}.sum(2)",
        f"{cells}.mean(2, keepdim=True).squeeze(2)",
        p.let(f"{cells}.mean(2, dtype=torch.float64)") + f".to({x}.dtype)",
        f"{x}.unflatten(1, ({C // 2}, 2)).mean(2)", f"{x}.unflatten(1, (2, {C // 2})).mean(1)",
        f"{x}.unflatten(1, ({C}, 1)).mean(2)",
        f"{x}.transpose(1, 2).reshape{shape}.unflatten(1, (-1, 2)).mean(2)",
        f"{x}.unflatten(2, (-1, 1)).mean((1, 3), keepdim=True).squeeze(3)",
    )  # fmt: skip
    p.add(y)


POOLED = """
F.avg_pool1d({v}, {k})
F.avg_pool1d({v}[..., 1:], {k})
torch.cat([{v}[..., :1], F.avg_pool1d({v}[..., 1:], {k})], -1)
torch.cat([{v}[..., :1], F.avg_pool1d({v}[..., 1:], {k})], -1)
torch.cat([F.avg_pool1d({v}, {k}), {v}[..., -1:]], -1)
torch.cat([{w}[..., :1], F.avg_pool1d({v}, {k})], -1)
torch.cat([{w}[..., :1], F.avg_pool1d({v}[..., 1:], {k})], -1)
torch.cat([{v}, F.avg_pool1d({v}, {k})], -1)
F.avg_pool1d({v}, {k}, 1)
F.avg_pool1d({v}, {k}, {k}, {k} // 2)
F.avg_pool1d({v}, {k}, ceil_mode=True)
"""


@step(VIDEOS, 3)
def means_of_frames(p: Program, x: str) -> None:
    """Means of successive frames, as rows of one position and channel; then sometimes a pad."""
    N, C, T, H, W = p.shape(x)
    if T < 3:
        return
    orders = ["0, 3, 4, 1, 2"] * 2 + ["0, 4, 3, 1, 2", "3, 0, 4, 1, 2"]
    v, w = (f"{p.let(f'{x}.permute({p.choice(*orders)}).reshape({N * H * W}, {C}, {T})')}" for _ in range(2))
    y = p.let(p.one_of(POOLED, v=v, w=w, k=p.choice(2, 2, 3)))
    if p.chance(0.1):
        p.add(y)
    y = p.let(f"{y}.reshape({N}, {H}, {W}, {C}, -1).permute(0, 3, 4, 1, 2)")
    if p.chance(0.5):
        y = p.let(f"F.pad({y}, {p.choice('(0, 1, 0, 1)', '(1, 1, 1, 1)', '(0, 1, 0, -1)')})")
    p.add(y)


POOLS = """
F.avg_pool{d}d({x}, 2)
F.avg_pool{d}d({x}, {cell})
F.avg_pool{d}d({x}, {cell}, {cell})
F.avg_pool{d}d({x}, 2, 1)
F.avg_pool{d}d({x}, 2, padding=1)
F.avg_pool{d}d({x}, {cell}, ceil_mode=True)
F.avg_pool{d}d(F.pad({x}, {pads}), 2)
F.max_pool{d}d({x}, 2)
"""


@step(SPATIAL)
def pools(p: Program, x: str) -> None:
    d = p.value(x).dim() - 2
    cell = [p.choice(1, 2, 3) for _ in range(d)]
    pads = p.choice((0, 1) * d, (0, 1) * d, (1, 0) * d)
    p.add(p.one_of(POOLS, x=x, d=d, cell=cell, pads=pads))


@step(SPATIAL, 2)
def bands_of_cells(p: Program, x: str) -> None:
    """Sums of cells by filters of each channel, as in a wavelet transform, and their inverse."""
    rank, C = p.value(x).dim(), channels(p, x)
    large = [a for a in range(rank - 2) if p.shape(x)[2 + a] > 2]
    if C > 8 or len(large) < 2 or math.prod(p.shape(x)) > 2000:
        return
    axes = p.random.sample(large, 2)
    kernel = [2 if a in axes else 1 for a in range(rank - 2)]
    if p.chance(0.3):
        x = p.let(f"F.pad({x}, {(0, 1) * (rank - 2)}, mode={p.choice('constant', 'replicate')!r})")
    for _ in range(p.choice(1, 2)):
        bands = [x]
        for axis in axes:
            size = [2 if a == axis else 1 for a in range(rank - 2)]
            stride = size if p.chance(0.95) else [1] * (rank - 2)
            ws = [p.let(p.tensor(1, 1, *size) + f".expand({(C, 1, *size)})") for _ in "ab"]
            conv = f"F.conv{rank - 2}d({{}}, {{}}, None, {stride}, groups={C})"
            bands = [p.let(conv.format(v, w)) for v in bands for w in ws]
        if p.chance(0.1):
            p.add(p.choice(*bands))
        if p.chance(0.2):
            p.random.shuffle(bands)
        x = p.let(f"torch.cat([{', '.join(bands)}], {p.choice(1, 1, 1, 1, 2)})")
        if p.chance(0.5):
            x = p.let(p.choice(f"{x} / 2.0", f"{x} * 0.5", f"{x} / 0.5", f"{x} * 2.0", f"2.0 / {x}.exp()"))
        C = channels(p, x)
        if C > 32:
            break
    p.add(x if p.chance(0.5) else _inverse_of_cells(p, x, kernel))


def _inverse_of_cells(p: Program, x: str, kernel: list[int]) -> str:
    """Cells of a part of the channels, from the sums of the other parts."""
    rank, count = len(kernel) + 2, 4
    C = channels(p, x) // count
    conv = f"F.conv_transpose{rank - 2}d({{}}, {{}}, None, {{}}, groups={C})"
    starts = [C * i for i in range(count)]
    if p.chance(0.1):
        starts[0] = starts[-1]
    found = [f"{x}[:, {start}:{start + C}]" for start in starts]
    for axis in (a for a, k in enumerate(kernel) if k > 1):
        size = [2 if a == axis else 1 for a in range(rank - 2)]
        stride = size if p.chance(0.95) else [s + 1 for s in size]
        ws = [p.tensor(C, 1, *size) for _ in "ab"]
        one, two = ([p.let(conv.format(v, w, stride)) for v in found[i::2]] for i, w in enumerate(ws))
        found = [p.let(p.choice(*[f"{b} + {a}"] * 6, f"{b} - {a}")) for a, b in zip(one, two, strict=True)]
    return p.choice(*found * 3, f"{found[0]} * 2.0")


STACKED = """
torch.stack({parts}, {dim})
torch.stack({parts}, {dim}).flatten({before}, {dim})
torch.cat({parts}, {dim})
torch.cat({parts}, {dim}).transpose(0, 1)
torch.stack([v.flatten(1) for v in {parts}], 2)
torch.stack([v.transpose(0, 1) for v in {parts}], {dim})
"""


@step(ANY, 2)
def parts_along_another_axis(p: Program, x: str) -> None:
    rank, axis = p.value(x).dim(), p.choice(1, 1, 2)
    size = p.shape(x)[axis]
    parts = p.choice(
        f"{x}.chunk(2, {axis})", f"{x}.split(1, {axis})", f"{x}.unbind({axis})",
        f"{x}.chunk(2, {axis})[::-1]", f"{x}.split({max(size // 3, 1)}, {axis})", f"{x}.chunk(4, {axis})[:2]",
    )  # fmt: skip
    dim = p.random.randrange(1, rank - 1)
    y = p.let(p.one_of(STACKED, parts=parts, dim=dim, before=dim - 1))
    p.add(p.choice(y, f"{y} * 2"))


# ---- residual blocks


@step(SPATIAL, 3)
def resnet_block(p: Program, x: str) -> None:
    C, N = channels(p, x), p.shape(x)[0]
    h = p.let(activated(p, p.let(grouped(p, x)), 0.95))
    h = p.let(convolved(p, h, kernel=3, out=C))
    if p.chance(0.7):
        rows = p.choice(N, N, N, 1)
        silu = p.choice("F.silu({})", "F.silu({})", "F.relu({})", "{}").format(p.tensor(rows, 6))
        e = p.let(f"F.linear({silu}, {p.tensor(C, 6, scale=0.4)}, {p.tensor(C)}){ones(p, x)}")
        h = p.let(
            p.choice(f"{h} + {e}", f"{h} + {e}", f"{e} + {h}", f"{h} * {e}", f"{h} - {e}", f"{h} + 0.5 * {e}")
        )
        if p.chance(0.15):
            p.add(h)
    h = p.let(activated(p, p.let(grouped(p, h)), 0.95))
    h = p.let(convolved(p, h, kernel=3, out=C))
    if p.chance(0.1):
        p.add(h)
    if p.chance(0.15):
        h = p.let(f"{h} * 0.5")
    residual = p.let(convolved(p, x, kernel=p.choice(1, 3), out=C)) if p.chance(0.4) else x
    total = p.choice(
        f"{residual} + {h}", f"{h} + {residual}", f"torch.add({h}, {residual}, alpha=2)", f"{h} - {residual}"
    )
    y = p.let(f"({total}) / {p.choice('1.0', '2.0', '1.5', '2 ** 0.5')}" if p.chance(0.6) else total)
    if p.chance(0.15):
        p.add(y)
    p.add(activated(p, p.let(grouped(p, y))) if p.chance(0.5) else y)


SUMS = """
{x} + {y}
({x} + {y}) / 2.0
({x} + {y}) / 1.5
({x} + {y}) * 0.5
({x} + {y} + {x}) / 3
{x} - {y}
{x} + {x}
{x} * {y}
torch.add({x}, {y}, alpha=0.5)
torch.rsub({x}, {y}, alpha=2)
2.0 / ({x}.abs() + 1)
"""


@step(ANY, 2)
def total(p: Program, x: str) -> None:
    p.add(p.one_of(SUMS, x=x, y=p.other(x)))


BLENDS = """
{a} * {x} + {b} * {y}
{a} * {x} + {b} * {y}
{y} * {b} + {x} * {a}
{x} * {a} + {y} * {a}
{a} * {x} - {b} * {y}
torch.add({a} * {x}, {b} * {y}, alpha=2)
{a} * {x} + {y}
"""


@step(SPATIAL, 4)
def blended(p: Program, x: str) -> None:
    """``x`` and another tensor, each times a number of each sample or frame; sometimes of something else."""
    N, C, *size = p.shape(x)
    ones = [1] * len(size)
    of_frames = (1, 1, size[0], *ones[1:])
    few = p.choice((1,), (1,), (N, 1, *ones), (1, *ones), of_frames, (N, *of_frames[1:]))
    a = p.tensor(*(few if p.chance(0.85) else p.choice((C, *ones), (size[-1],), (size[-2], 1))))
    b = p.let(f"1.0 - {a}") if p.chance(0.7) else p.tensor(*few)
    h = p.let(convolved(p, x, out=C)) if p.chance(0.7) else p.other(x)
    total = p.choice(f"{x} + {h}", f"{x} + {h}", f"{h} + {x}", f"{x} - {h}", f"{h} + {p.other(x)}")
    y = p.let(h if p.chance(0.2) else total)
    if p.chance(0.15):
        p.add(y)
    mixed = p.let(p.one_of(BLENDS, a=a, b=b, x=x, y=y))
    if len(size) == 3 and p.chance(0.5):
        images = p.let(f"{mixed}.transpose(1, 2).flatten(0, 1)")
        p.add(grouped(p, images))
    p.add(grouped(p, mixed) if p.chance(0.3) else mixed)


@step(SPATIAL, 2)
def channels_joined(p: Program, x: str) -> None:
    y = p.other(x)
    parts = p.choice((x, y), (x, y), (y, x), (x, x), (x, y, x))
    z = p.let(f"torch.cat([{', '.join(parts)}], {p.choice(1, 1, 1, 1, 2, -1)})")
    if p.chance(0.15):
        p.add(z)
    y = p.let(activated(p, p.let(grouped(p, z)))) if p.chance(0.8) else z
    p.add(convolved(p, y, out=channels(p, x)) if p.chance(0.6) else y)


@step(SPATIAL, 2)
def activated_conv(p: Program, x: str) -> None:
    """An activation of a convolution, or of its sum with a residual; then sometimes a norm."""
    h = p.let(convolved(p, x, out=channels(p, x)))
    if p.chance(0.4):
        h = p.let(p.choice(f"{x} + {h}", f"{h} + {x}", f"({h} + {x}) / 2.0", f"{h} + {p.other(h)}"))
    if p.chance(0.3):
        h = p.let(f"F.relu({h})")
    if p.chance(0.1):
        p.add(h)
    if p.chance(0.1):
        h = p.let(f"{h}.flatten(2).reshape({p.shape(h)})")
    y = p.let(activated(p, h, 0.95))
    p.add(p.choice(y, y, convolved(p, y), grouped(p, y), activated(p, y)))


READ_TWICE = """
{h} + F.silu({n})
F.silu({n}) + {n}
F.silu({n}) * {h}.mean()
F.silu({n}) + F.relu({n})
F.silu({n}) * F.silu({h})
{x} + {h} + {n}
torch.cat([{h}, {n}], 1)
{n} + {h}[:, :, :1]
"""


@step(SPATIAL)
def read_twice(p: Program, x: str) -> None:
    """A convolution, a norm or an activation that two others read."""
    h = p.let(convolved(p, x, kernel=3, out=channels(p, x)))
    p.add(p.one_of(READ_TWICE, x=x, h=h, n=p.let(grouped(p, h))))
    if p.chance(0.3):
        p.pool.insert(0, h)
