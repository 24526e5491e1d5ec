"""The steps of random programs: what models write, and what only looks like it.

Each step writes a few lines that read a tensor of the pool. By chance it writes what a rule matches, or a
near miss: another axis, another dtype, a number between, a value that is read elsewhere, swapped operands.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from tests.plans.programs import Program

Step = Callable[[Program, str], None]
# Ranks of the tensor that a step reads -> the steps, each as often as it should occur.
STEPS: dict[tuple[int, ...], list[Step]] = {}
IMAGES, VIDEOS, SPATIAL, TOKENS, ANY = (4,), (5,), (4, 5), (3,), (3, 4, 5)
# Share of programs with a step that reads values or strides, which may have no plan.
READS = 0.02


def step(ranks: tuple[int, ...], times: int = 1) -> Callable[[Step], Step]:
    def add(function: Step) -> Step:
        STEPS.setdefault(ranks, []).extend([function] * times)
        return function

    return add


REFUSED = """
if {x}.sum() > 1e9: {x} = {x} + 1
{x} = {x} * {x}.max().item()
{x} = {x}.as_strided({shape}, {strides}) * 1.0
{x}[{mask}] = 0.0
{k}.add_(1)
"""


def write(p: Program) -> None:
    """Writes 2 to 12 steps."""
    N = p.choice(1, 2, 2)
    C = p.choice(4, 8, 8)
    rank = p.choice(3, 4, 4, 5, 5)
    size = {3: (N, p.choice(3, 6, 20), C), 4: (N, C, 6, 5), 5: (N, C, p.choice(1, 3, 4), 4, 5)}[rank]
    p.pool += [p.tensor(*size, kind="x", last=p.chance(0.5)) for _ in range(p.choice(1, 2, 2))]
    reads_at = p.random.randrange(12) if p.chance(READS) else -1
    for i in range(p.random.randint(2, 12)):
        x = p.pick(*ANY)
        found = [f for ranks, steps in STEPS.items() if p.value(x).dim() in ranks for f in steps]
        with contextlib.suppress(RuntimeError, ValueError):  # shapes that this step's last line cannot take
            p.choice(*found)(p, x)
        if i == reads_at:
            x = p.pick(*ANY)
            p.may_be_refused = True
            p.do(
                p.one_of(
                    REFUSED,
                    x=x,
                    mask=mask(p, x),
                    shape=p.shape(x),
                    strides=p.value(x).stride(),
                    k=p.tensor(4, kind="k"),
                )
            )


# ---- parts of steps


def mask(p: Program, x: str) -> str:
    """A mask of the shape of ``x``, from an input: eager and plan must agree about every element."""
    return f"({p.tensor(*p.shape(x), kind='x')} > 0)"


def channels(p: Program, x: str) -> int:
    shape = p.shape(x)
    return shape[-1] if len(shape) == 3 else shape[1]


def ones(p: Program, x: str) -> str:
    """An index that gives a tensor of (N, C) the rank of ``x``."""
    return f"[:, :{', None' * (p.value(x).dim() - 2)}]"


def per_channel(p: Program, x: str) -> str:
    """A tensor with one number a channel; sometimes one a sample, one a position, or a single one."""
    N, C, *size = p.shape(x)
    ones = [1] * len(size)
    if p.chance(0.85):
        return p.tensor(C, *ones)
    return p.tensor(*p.choice((N, C, *ones), (1, C, *ones), (1, 1, *size), (size[-1],), (1,), (N, 1, *ones)))


def activated(p: Program, x: str, probability: float = 0.8) -> str:
    """An activation of ``x``, or ``x``; sometimes with something between them."""
    if not p.chance(probability):
        return x
    if p.chance(0.1):
        x = p.choice(f"({x} * 0.5)", f"({x} / 1.0)", f"({x} + 0.25)", f"{x}.to(torch.bfloat16).to({x}.dtype)")
    if p.chance(0.1):
        p.add(x if x.isidentifier() else p.let(x))
    silu = f"F.silu({x})"
    return p.choice(
        silu, silu, silu, silu, f"F.relu({x})", f"F.gelu({x})", f"F.gelu({x}, approximate='tanh')",
        f"torch.sigmoid({x})", f"F.silu({silu})", f"torch.tanh({x})", f"{x} * torch.sigmoid({x})",
    )  # fmt: skip


def cast(p: Program, x: str) -> str:
    """``x`` after casts: to itself, there and back, or rounded."""
    return p.choice(
        f"{x}.to({x}.dtype)", f"{x}.double().to({x}.dtype)", f"{x}.float().to({x}.dtype)",
        f"{x}.to(torch.bfloat16).to({x}.dtype)", f"{x}.type_as(x0)",
    )  # fmt: skip


def convolved(p: Program, x: str, **options: Any) -> str:
    """A convolution of ``x``. Options: out, kernel, padding, bias, and others as text."""
    rank, C = p.value(x).dim(), channels(p, x)
    kernel = options.pop("kernel", None) or p.choice(3, 3, 3, 1)
    kernel = kernel if isinstance(kernel, tuple) else (kernel,) * (rank - 2)
    out = options.pop("out", None) or p.choice(C, C, C, 2 * C if C < 16 else 4)
    weight = p.tensor(out, C, *kernel, scale=1 / math.sqrt(C * math.prod(kernel)), last=p.chance(0.8))
    bias = p.tensor(out) if options.pop("bias", p.chance(0.8)) else "None"
    padding = options.pop("padding", tuple(k // 2 for k in kernel))
    text = "".join(f", {name}={value}" for name, value in options.items())
    return f"F.conv{rank - 2}d({x}, {weight}, {bias}, padding={padding}{text})"


def grouped(p: Program, x: str, *, affine: bool | None = None) -> str:
    """A GroupNorm of ``x``."""
    C = channels(p, x)
    groups = p.choice(*[g for g in (1, 2, 4) if C % g == 0])
    affine = p.chance(0.8) if affine is None else affine
    weight = f", {p.tensor(C)}, {p.tensor(C)}" if affine else ""
    if not affine and p.chance(0.2):
        weight = f", {p.tensor(C)}" if p.chance(0.5) else f", None, {p.tensor(C)}"
    text = f"F.group_norm({x}, {groups}{weight}, eps={p.choice(1e-5, 1e-6, 0.1)})"
    if p.chance(0.1):
        wide = p.choice("double", "float")
        inner = text.replace(x, f"{x}.{wide}()", 1)
        text = f"F.group_norm({x}.{wide}(), {groups}).to({x}.dtype)" if weight else f"{inner}.to({x}.dtype)"
    return text


def roots(p: Program, x: str, axis: int) -> str:
    """A norm of one axis of ``x``, in one of the ways in which models write an RMS norm."""
    size = p.shape(x)[axis]
    eps = p.choice("1e-6", "1e-5", "0.1")
    of = p.choice(x, x, x, x, x, x, f"({x} * 2)", p.other(x))
    square = p.choice(f"{of}.pow(2)", f"{of}.pow(2)", f"{of}.square()", f"{of} * {of}", f"{of}.pow(4)")
    mean = f"({square}).mean({axis}, keepdim=True)"
    return p.choice(
        f"F.normalize({x}, dim={axis}) * {size**0.5}",
        f"F.normalize({x}, dim={axis})",
        f"F.normalize({x}, dim={axis}, eps={eps}) * {size**0.5}",
        f"F.normalize({x}, p={p.choice(1, 2, 3)}, dim={axis})",
        f"{x} * torch.rsqrt({mean} + {eps})",
        f"torch.rsqrt({mean} + {eps}) * {x}",
        f"{x} / torch.sqrt({mean} + {eps})",
        f"({x}.float() * torch.rsqrt({mean.replace(of, f'{of}.float()')} + {eps})).to({x}.dtype)",
        f"{x} / ({x}.norm(dim={axis}, keepdim=True) + {eps})",
    )


def flat(p: Program, x: str) -> str:
    """``x`` as tokens."""
    return p.let(f"{x}.flatten(2).transpose(1, 2)" if p.chance(0.5) else f"{x}.movedim(1, -1).flatten(1, -2)")


def unflat(p: Program, t: str, x: str) -> str:
    """The tokens ``t`` in the shape of the image or video ``x``."""
    return f"{t}.transpose(1, 2).reshape({p.shape(x)})"


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


LAST_NORMS = """
F.rms_norm({v}, ({C},), {w}, 1e-6)
F.rms_norm({v}, ({C},))
F.layer_norm({v}, ({C},), {w}, {b})
F.layer_norm({v}, ({C},))
F.layer_norm({v}, {last})
"""


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


# ---- videos


@step(VIDEOS, 3)
def causal_conv(p: Program, x: str) -> None:
    C = channels(p, x)
    v = p.let(activated(p, p.let(p.choice(grouped(p, x), roots(p, x, 1))))) if p.chance(0.7) else x
    if p.chance(0.12):
        v = p.let(f"{v}[:, :, :1]")
    if p.chance(0.3) and math.prod(p.shape(v)) < 1200:
        times = p.choice("(2.0, 1.0, 1.0)", "(1.0, 2.0, 1.0)", "(2.0, 1.0, 2.0)")
        v = p.let(f"F.interpolate({v}, scale_factor={times})")
    cache = p.tensor(*p.shape(v)[:2], 2, *p.shape(v)[3:], kind="x")
    w, h = p.choice((1, 1), (1, 1), (0, 0))
    y = p.let(
        p.choice(
            f"torch.cat([{v}[:, :, :1]] * 2 + [{v}], 2)",
            f"torch.cat([{v}[:, :, :1].repeat(1, 1, 2, 1, 1), {v}], 2)",
            f"torch.cat([{v}[:, :, :1].expand(-1, -1, 2, -1, -1), {v}, {v}[:, :, -1:]], 2)",
            f"torch.cat([{v}[:, :, -1:].repeat(1, 1, 2, 1, 1), {v}], 2)",
            f"F.pad({v}, ({w}, {w}, {h}, {h}, 2, 0), mode='replicate')",
            f"F.pad({v}, ({w}, {w}, {h}, {h}, 1, 1), mode='replicate')",
            f"F.pad({v}, ({w}, {w}, {h}, {h}, 2, 0))", f"F.pad({v}, ({w}, {w}, {h}, {h}, 2, 0))",
            f"F.pad(F.pad({v}, (0, 0, 0, 0, 2, 0), mode='replicate'), ({w}, {w}, {h}, {h}, 0, 0))",
            f"F.pad(F.pad({v}, ({w}, {w}, {h}, {h}, 0, 0)), (0, 0, 0, 0, 2, 0), mode='replicate')",
            f"F.pad({v}, ({w}, {w}, {h}, {h}, 2, 0), value=1.0)", f"F.pad({v}, ({w}, 0, {h}, 0, 2, 0))",
            f"torch.cat([{cache}, {v}], 2)", v,
        )
    )  # fmt: skip
    if p.chance(0.25):
        y = p.let(activated(p, p.let(grouped(p, y))))
    if p.chance(0.3):
        kept = p.choice(y, f"{y}[:, :, -2:]", f"{v}[:, :, -2:].clone()", f"{v}[:, :, -1:]", f"{v}[:, :, :1]")
        p.add(kept)
    padding = (0, 1, 1) if p.chance(0.5) else 0
    y = p.let(convolved(p, y, kernel=(3, 3, 3), out=C, padding=padding, stride=p.choice(1, 1, 1, (2, 1, 1))))
    p.add(f"{y} + {x}" if p.shape(y) == p.shape(x) and p.chance(0.5) else y)


@step(VIDEOS, 3)
def convs_in_chunks(p: Program, x: str) -> None:
    """Chunks of frames, each after the last frames of the one before it."""
    C, T = p.shape(x)[1:3]
    weight, bias = p.tensor(C, C, 3, 3, 3, scale=0.2 / C**0.5, last=p.chance(0.8)), p.tensor(C)
    size, kept, parts = p.choice(1, 1, 2), "", []
    norm = p.choice("F.silu(F.group_norm({}, 2))", "F.silu(F.normalize({}, dim=1) * 3)", "F.relu({})", "{}")
    border = p.choice("1, 1, 1, 1", "1, 1, 1, 1", "0, 0, 0, 0")
    for i in range(0, T, size):
        v = p.let(norm.format(f"{x}[:, :, {i}:{i + size}]"))
        keep = p.let(f"{v}[:, :, -2:]{p.choice('.clone()', '')}")
        if p.shape(keep)[2] < 2 and kept:
            keep = p.let(f"torch.cat([{kept}[:, :, -1:]{p.choice('.clone()', '')}, {keep}], 2)")
        if p.chance(0.05):
            p.add(p.choice(v, keep))
        front = 2
        if kept:
            front -= p.shape(kept)[2]
            v = p.let(f"torch.cat([{kept}, {v}], 2)")
        padded = f"F.pad({v}, ({border}, {front}, 0))" if front or border[0] != "0" else v
        parts.append(p.let(f"F.conv3d({padded}, {weight}, {bias})"))
        kept = keep if p.chance(0.95) else ""
    p.add(f"torch.cat([{', '.join(parts)}], 2)")


@step(VIDEOS)
def upsampled_after_first_frame(p: Program, x: str) -> None:
    C, T = p.shape(x)[1:3]
    if T < 2 or math.prod(p.shape(x)) > 1200:
        return
    n = p.choice(1, 1, 1, 2)
    first = p.let(f"F.interpolate({x}[:, :, 0], scale_factor=(2, 2), mode='nearest').unsqueeze(2)")
    others = f"{x}[:, :, {n}:]{p.choice('.contiguous()', '')}"
    rest = p.let(f"F.interpolate({others}, scale_factor={p.choice(2.0, (1.0, 2.0, 2.0))})")
    y = p.let(f"torch.cat([{first}, {rest}], 2)" if p.chance(0.9) else f"torch.cat([{rest}, {first}], 2)")
    if p.chance(0.15):
        p.add(y)
    mode = p.choice(", mode='replicate'", "")
    p.add(convolved(p, p.let(f"F.pad({y}, (1, 1, 1, 1, 2, 0){mode})"), kernel=3, padding=0, out=C))


@step(VIDEOS, 2)
def upsampled_images(p: Program, x: str) -> None:
    """Frames that are repeated along time, and convolved as images."""
    N, C, T, H, W = p.shape(x)
    if math.prod(p.shape(x)) > 1200:
        return
    scale = p.choice("2.0", "2.0", "(2.0, 1.0, 1.0)", "(1.0, 2.0, 2.0)", "(4.0, 1.0, 1.0)")
    y = p.let(f"F.interpolate({x}, scale_factor={scale})")
    if T > 1 and p.chance(0.3):
        first = f"F.interpolate({x}[:, :, 0], scale_factor=2.0).unsqueeze(2)"
        y = p.let(f"torch.cat([{first}, F.interpolate({x}[:, :, 1:], scale_factor=2.0)], 2)")
    if p.chance(0.1):
        p.add(y)
    T, H, W = p.shape(y)[2:]
    order = p.choice("0, 2, 1, 3, 4", "0, 2, 1, 3, 4", "0, 2, 1, 3, 4", "2, 0, 1, 3, 4")
    images = p.let(f"{y}.permute({order}).reshape({N * T}, {C}, {H}, {W})")
    z = p.let(convolved(p, images, out=C))
    p.add(f"{z}.reshape({N}, {T}, {C}, *{z}.shape[2:]).transpose(1, 2)")


@step(VIDEOS, 2)
def spatial_norm(p: Program, x: str) -> None:
    """A GroupNorm, times and plus convolutions of a small video that is upsampled to x."""
    N, C, T, H, W = p.shape(x)
    small = p.tensor(N, 4, (T + 1) // 2, p.choice((H + 1) // 2, H), (W + 1) // 2 if W % 2 else W // 2)
    if T > 1 and T % 2 and p.chance(0.8):
        first = f"F.interpolate({small}[:, :, :1], size=(1, {H}, {W}))"
        z = p.let(f"torch.cat([{first}, F.interpolate({small}[:, :, 1:], size=({T - 1}, {H}, {W}))], 2)")
    else:
        z = p.let(f"F.interpolate({small}, size=({T}, {H}, {W}))")
    factor, offset = (p.let(convolved(p, z, kernel=1, out=C)) for _ in range(2))
    n = p.let(grouped(p, x))
    if p.chance(0.15):
        p.add(p.choice(n, factor))
    y = p.choice(
        f"{n} * {factor} + {offset}",
        f"{n} * {factor} + {offset}",
        f"{offset} + {factor} * {n}",
        f"({n} + {offset}) * {factor}",
    )
    y = p.add(activated(p, p.let(y)))
    if p.chance(0.4):
        p.add(convolved(p, y, kernel=3, out=C))


@step(VIDEOS, 3)
def frames_as_images(p: Program, x: str) -> None:
    N, C, T, H, W = p.shape(x)
    wrong = p.chance(0.15)  # frames before samples
    if p.chance(0.15):  # rows as images
        v = p.let(f"{x}.permute(0, 3, 1, 2, 4).reshape({N * H}, {C}, {T}, {W})")
        v = p.let(activated(p, p.let(grouped(p, v))))
        p.add(f"{v}.reshape({N}, {H}, {C}, {T}, {W}).permute(0, 2, 3, 1, 4)")
        return
    to, back = ("2, 0, 1, 3, 4", "1, 2, 0, 3, 4") if wrong else ("0, 2, 1, 3, 4", "0, 2, 1, 3, 4")
    v = p.let(f"{x}.permute({to}).reshape({N * T}, {C}, {H}, {W})")
    if p.chance(0.4):
        v = p.let(convolved(p, v, out=C))
    v = p.let(activated(p, p.let(p.choice(grouped(p, v), grouped(p, v), roots(p, v, 1)))))
    if p.chance(0.3):
        v = p.let(convolved(p, v, out=C))
    if p.chance(0.15):
        p.add(v)
    if p.chance(0.2) and p.shape(v)[0] * p.shape(v)[1] == N * T * C:
        v = p.let(f"F.interpolate({v}, scale_factor=2.0, mode='nearest')")
        H, W = 2 * H, 2 * W
    y = p.let(f"{v}.reshape({(T, N, C, H, W) if wrong else (N, T, C, H, W)}).permute({back})")
    p.add(f"{y} + {x}" if p.shape(y) == p.shape(x) and p.chance(0.4) else y)


@step(VIDEOS)
def attention_over_frames(p: Program, x: str) -> None:
    N, C, T, H, W = p.shape(x)
    t = p.let(f"{x}.permute(0, 3, 4, 2, 1).reshape({N * H * W}, {T}, {C})")
    y = _attended(p, p.let(f"F.layer_norm({t}, ({C},))"), t)
    p.add(f"({y} + {t}).reshape({N}, {H}, {W}, {T}, {C}).permute(0, 4, 3, 1, 2)")


# ---- tokens


@step(SPATIAL)
def to_tokens_and_back(p: Program, x: str) -> None:
    """Blocks of tokens between two convolutions of one pixel."""
    C = channels(p, x)
    h = p.let(convolved(p, p.let(grouped(p, x)), kernel=1, out=C))
    t = flat(p, h)
    for _ in range(p.choice(1, 2)):
        t = _tokens(p, t)
    y = p.let(unflat(p, t, x))
    y = p.let(convolved(p, y, kernel=1, out=C)) if p.chance(0.5) else y
    p.add(f"{y} + {x}")


ROTATED = """
{x} * {c} + torch.stack([-{x1}, {x0}], -1).flatten(-2) * {s}
{x} * {c} + torch.stack([-{x1}, {x0}], -1).flatten(-2) * {s}
torch.stack([-{x1}, {x0}], -1).flatten(-2) * {s} + {c} * {x}
{x} * {c} + torch.stack([{x1}, -{x0}], -1).flatten(-2) * {s}
{x} * {c} - torch.stack([-{x1}, {x0}], -1).flatten(-2) * {s}
{x} * {c} + torch.stack([-{x0}, {x1}], -1).flatten(-2) * {s}
{x} * {c} + torch.cat([-{x1}, {x0}], -1) * {s}
{x} * {c} + torch.cat([-{h1}, {h0}], -1) * {s}
{c} * {x} + {s} * torch.cat([-{h1}, {h0}], -1)
{x} * {c} + torch.cat([-{h0}, {h1}], -1) * {s}
{x} * {c} - torch.cat([-{h1}, {h0}], -1) * {s}
torch.stack([{x0} * {c} - {x1} * {s}, {x0} * {s} + {x1} * {c}], -1).flatten(-2)
"""


@step(TOKENS, 2)
def rotated(p: Program, x: str) -> None:
    """Pairs of neighbors or of halves of heads, or of whole rows, are rotated; sometimes after a norm."""
    N, S, _ = p.shape(x)
    normed = p.let(_norm_of_rows(p, x)) if p.chance(0.3) else x
    heads = p.let(f"{normed}.unflatten(-1, (2, -1))") if p.chance(0.7) else x
    D = p.shape(heads)[-1]
    if D % 2:
        return
    pairs = p.let(f"{heads}.unflatten(-1, (-1, 2))")
    x0, x1 = p.let(f"{pairs}[..., 0]"), p.let(f"{pairs}[..., 1]")
    text = p.choice(*ROTATED.strip().splitlines())
    columns = D // 2 if "{x0} * {c}" in text else D
    size = (1, S, 1, columns) if heads != x else (1, S, columns)
    c, s = (p.tensor(*p.choice(size, size, (N, *size[1:]))) for _ in range(2))
    split = p.choice("{}.chunk(2, -1)[{}]", "{}.unflatten(-1, (2, -1)).unbind(-2)[{}]")
    h0, h1 = (split.format(heads, i) for i in (0, 1))
    y = p.let(text.format(x=heads, x0=x0, x1=x1, h0=h0, h1=h1, c=c, s=s))
    p.add(p.let(f"{y}.reshape({p.shape(x)})"))


@step(TOKENS, 3)
def joined_heads(p: Program, x: str) -> None:
    """Heads of two kinds of tokens: their norms, rotations and concatenations, and attention."""
    N, S, C = p.shape(x)
    if C % 4:
        return
    y = p.tensor(N, p.choice(1, 3, S), C, kind="x")
    heads = [p.let(f"{t}.unflatten(-1, (2, -1))") for t in p.choice((x, y), (y, x), (x, x))]
    axis = p.choice(1, 2)  # of the tokens
    if axis == 2:
        heads = [p.let(f"{h}.transpose(1, 2)") for h in heads]
    parts = [_head_norm(p, h) for h in heads]
    when = p.choice("before", "after", "after", "both", "the first one", "never")
    if when in ("before", "both"):
        parts = [_turned_heads(p, part, axis) for part in parts]
    elif when == "the first one":
        parts[0] = _turned_heads(p, parts[0], axis)
    if p.chance(0.1):
        parts[0] = p.let(f"{parts[0]}.narrow({axis}, 0, 1)")
    if p.chance(0.2) and C % 8 == 0:
        other_rows = p.choice(f"narrow(3, 0, {C // 4})", "unflatten(3, (2, -1)).flatten(2, 3)")
        parts = [p.let(f"{part}.{other_rows}") for part in parts]
    if p.chance(0.15):
        p.add(parts[1])
    can_be_any = p.shape(parts[0]) == p.shape(parts[1])
    along = p.choice(0, 1, 2, 3) if can_be_any and p.chance(0.4) else axis
    joined = p.let(f"torch.cat([{', '.join(parts)}], {along})")
    q = _turned_heads(p, joined, axis) if when in ("after", "both") else joined
    if p.chance(0.15):
        p.add(joined)
    v = p.let(f"torch.cat([{', '.join(heads)}], {axis})")
    q, v = (t if axis == 2 else p.let(f"{t}.transpose(1, 2)") for t in (q, v))
    if p.chance(0.6) and p.shape(q) == p.shape(v):
        q = p.let(f"F.scaled_dot_product_attention({q}, {q}, {v})")
    p.add(f"{q}.transpose(1, 2).flatten(2)")


HEAD_NORMS = """
{h}
F.rms_norm({h}, ({D},), {w}, 1e-6)
F.rms_norm({h}, ({D},), {w}, 0.1)
F.rms_norm({h}, ({D},), {w}, 1e-6) + {w}
F.rms_norm({h}, ({D},), {w}, 1e-6) * 2
F.rms_norm({h}.flatten(2), ({E},), {v}, 1e-6).view({size})
"""


def _head_norm(p: Program, h: str) -> str:
    size = p.shape(h)
    D, E = size[-1], size[-1] * size[-2]
    if p.chance(0.4):
        return p.let(f"{p.let(roots(p, h, -1))} * {p.tensor(D)}")
    return p.let(p.one_of(HEAD_NORMS, h=h, w=p.tensor(D), v=p.tensor(E), D=D, E=E, size=size))


def _turned_heads(p: Program, h: str, axis: int) -> str:
    """The heads with their pairs rotated: by one angle a token, or one for all."""
    size = [1, 1, 1, p.shape(h)[-1]]
    size[axis] = p.choice(1, p.shape(h)[axis], p.shape(h)[axis])
    size[0] = p.choice(1, 1, p.shape(h)[0])
    c, s = p.tensor(*size), p.tensor(*size)
    pairs = p.let(f"{h}.unflatten(-1, (-1, 2))")
    return p.let(f"{h} * {c} + torch.stack([-{pairs}[..., 1], {pairs}[..., 0]], -1).flatten(-2) * {s}")


@step(TOKENS, 3)
def modulated_tokens(p: Program, x: str) -> None:
    """A gated sum of tokens, its norm and the modulation of the norm; each of them may be missing."""
    N, S, C = p.shape(x)
    y = p.other(x)
    if p.chance(0.3):
        y = p.let(_norm_of_rows(p, y))
    elif p.chance(0.3):
        part = f"torch.cat([{y}, {x}], 1)[:, 1:{S + 1}]"
        y = p.let(f"F.linear({part}, {p.tensor(C, C, scale=C**-0.5)}, {p.tensor(C)})")
        if p.chance(0.1):
            p.add(y)
    gate, factor, offset = (_modulation(p, N, S, C) for _ in range(3))
    total = p.one_of(GATED_SUMS, x=x, y=y, gate=gate)
    total = p.let(cast(p, p.let(total)) if p.chance(0.15) else total)
    if p.chance(0.5):
        p.add(total)
    normed = p.let(_norm_of_rows(p, total) if p.chance(0.85) else total)
    if p.chance(0.1):
        p.add(normed)
    if p.chance(0.15):
        normed = p.let(cast(p, normed))
    if p.chance(0.1):
        offset = p.let(f"{normed}.mean(1, keepdim=True)")
    p.add(p.let(p.one_of(MODULATED_TOKENS, y=normed, factor=factor, offset=offset)))


GATED_SUMS = """
{x}
{x} + {gate} * {y}
{x} + {gate} * {y}
{x} + {y} * {gate}
{y} * torch.tanh({gate}) + {x}
{x} + {y}
{x} - {gate} * {y}
torch.add({x}, {gate} * {y}, alpha=2)
{x} + F.gelu({y}) * {gate}
({x} + {y}) * {gate}
"""
MODULATED_TOKENS = """
{y}
{y} * (1 + {factor}) + {offset}
{y} * (1 + {factor}) + {offset}
{y} * (1 + {factor}) + {offset}
{offset} + {y} * {factor}
{y} * (2 + {factor}) + {offset}
{y} * (1 + {factor})
{y} + {offset}
{y} * {factor} * {offset}
({y} + {offset}) * {factor}
{y} * {factor} - {offset}
{y} * 2 + {offset}
"""


def _modulation(p: Program, N: int, S: int, C: int) -> str:
    """A part of an embedding of each sample; sometimes of each token, of all samples, or another size."""
    sizes = ((N, 1), (N, 1), (N, 1), (N, S), (1, 1), (1, S))
    if p.chance(0.15):
        return p.tensor(*p.choice((C,), (N, S, 1), (N, 1, 1), (1,)))
    if p.chance(0.5):
        return p.let(f"{p.tensor(*p.choice(*sizes), 3 * C)}[..., {C}:{2 * C}]")
    return p.tensor(*p.choice(*sizes), C)


def _norm_of_rows(p: Program, x: str) -> str:
    C = p.shape(x)[-1]
    if p.chance(0.4):
        norm = p.let(roots(p, x, -1 if p.chance(0.9) else 1))
        return f"{norm} * {p.tensor(C)}" if p.chance(0.6) else norm
    return p.one_of(LAST_NORMS, v=x, C=C, w=p.tensor(C), b=p.tensor(C), last=p.shape(x)[1:])


@step(TOKENS, 8)
def tokens(p: Program, x: str) -> None:
    if p.value(x).numel() > 2:  # eager refuses a GroupNorm of two groups of one value
        p.add(_tokens(p, x))


def _tokens(p: Program, t: str) -> str:
    """One block of a transformer, or part of it: (N, S, C) in and out."""
    C = p.shape(t)[-1]
    kind = p.choice(
        _attention_block,
        _attention_block,
        _gated_block,
        _gated_block,
        _sum_and_norm,
        _modulated,
        _one_product,
    )
    return p.let(kind(p, t, C))


TOKEN_NORMS = """
F.layer_norm({t}, ({C},), {w}, {b})
F.layer_norm({t}, ({C},), {w}, {b})
F.layer_norm({t}, ({C},), {w}, {b})
F.layer_norm({t}, ({C},))
F.layer_norm({t}, ({C},), {w})
F.layer_norm({t}, ({C},), None, {b}, 0.1)
F.layer_norm({t}.float(), ({C},)).to({t}.dtype)
F.layer_norm({t}, ({S}, {C}))
F.layer_norm({t}.transpose(1, 2), ({S},)).transpose(1, 2)
F.group_norm({t}.transpose(1, 2), 2).transpose(1, 2)
F.rms_norm({t}, ({C},), {w}, 1e-6)
F.rms_norm({t}, ({C},))
"""


def _normed(p: Program, t: str, C: int) -> str:
    """A norm of the channels of tokens; sometimes of another axis, or after casts."""
    options = {"w": p.tensor(C), "b": p.tensor(C), "S": p.shape(t)[1], "C": C}
    norm = p.choice(TOKEN_NORMS, TOKEN_NORMS, TOKEN_NORMS, roots(p, t, -1), roots(p, t, 1))
    return p.let(p.one_of(norm, t=t, **options))


def _linear(p: Program, t: str, out: int, bias: float = 0.7) -> str:
    C = p.shape(t)[-1]
    text = f", {p.tensor(out)}" if p.chance(bias) else ""
    return p.let(f"F.linear({t}, {p.tensor(out, C, scale=C**-0.5)}{text})")


def _attended(p: Program, t: str, residual: str) -> str:
    """Attention of two heads: the products q, k, v of one tensor, or of two."""
    N, S, C = p.shape(t)
    bias = p.choice(0.0, 1.0, 0.5)
    of = t
    if p.chance(0.25):
        of = p.tensor(N, p.choice(1, 4, 7), C, kind="x")
    q, k, v = (_linear(p, u, C, bias) for u in (t, of, of))
    if p.chance(0.1):
        p.add(p.choice(q, k, v))
    if p.chance(0.1):
        k = p.let(p.choice(f"{k} * 0.5", f"{k}.clone()", f"{k} + {q}" if of == t else f"{k} + 1"))
    if p.chance(0.1):
        k, v = v, k
    q, k, v = (p.let(f"{u}.view({N}, -1, 2, {C // 2}).transpose(1, 2)") for u in (q, k, v))
    if p.chance(0.15):
        q, k = (p.let(f"F.rms_norm({u}, ({C // 2},), {p.tensor(C // 2)}, 1e-6)") for u in (q, k))
    triangle = f", attn_mask=torch.ones({S}, {S}).tril({{}}).bool()"
    options = (
        p.choice(", is_causal=True", triangle.format(0), triangle.format(1))
        if of == t and p.chance(0.15)
        else f", scale={p.choice(0.3, 1.0)}"
        if p.chance(0.15)
        else ""
    )
    if p.chance(0.1):
        options = f", attn_mask={p.tensor(S, p.shape(k)[2])}"
    o = p.let(
        f"F.scaled_dot_product_attention({q}, {k}, {v}{options}).transpose(1, 2).reshape({N}, {S}, {C})"
    )
    return _linear(p, o, C)


def _attention_block(p: Program, t: str, C: int) -> str:
    y = _attended(p, _normed(p, t, C), t)
    if p.chance(0.15):
        p.add(y)
    if p.chance(0.15):
        y = p.let(p.choice(f"{y} * 0.5", f"{y} / 1.0"))
    return p.choice(f"{y} + {t}", f"{t} + {y}", f"({y} + {t}) / 2.0")


GATES = """
F.gelu({b})
F.gelu({b})
F.gelu({b}, approximate='tanh')
F.silu({b})
F.silu({b})
{b} * torch.sigmoid({b})
torch.sigmoid({b})
F.silu({b}.float()).to({b}.dtype)
F.silu({b}).to(torch.bfloat16).to({b}.dtype)
F.relu({b}).reshape({N}, {C}, {S}).mT
F.silu({b}[..., :1])
"""


def _gated_block(p: Program, t: str, C: int) -> str:
    """A feed-forward block with a gated product, of the halves of one product or of two products."""
    n = _normed(p, t, C)
    if p.chance(0.3):
        a, b = _linear(p, n, C), _linear(p, n, C)
    else:
        h = _linear(p, n, 2 * C)
        if p.chance(0.1):
            p.add(h)
        whole = p.choice("{h}.chunk(2, -1)[{i}]", "{h}.unflatten(-1, (2, -1))[:, :, {i}]")
        a, b = (p.let(whole.format(h=h, i=i)) for i in p.choice((0, 1), (1, 0)))
    gate, other = (p.one_of(GATES, b=u, N=p.shape(t)[0], S=p.shape(t)[1], C=C) for u in (b, a))
    if p.chance(0.1):
        gate = p.let(gate)
        p.add(gate)
    y = p.choice(
        *(f"{a} * {gate}", f"{a} * {gate}", f"({gate}) * {a}", f"{a} * {gate} * 2"),
        *(f"({other}) * {gate}", f"{b} * {gate}", f"{a} + {gate}"),
    )
    y = _linear(p, p.let(y), C)
    return p.choice(f"{y} + {t}", f"{t} + {y}", y, f"{y} * 0.5 + {t}")


def _sum_and_norm(p: Program, t: str, C: int) -> str:
    """Sums of tokens that a LayerNorm and a later sum read, as in a transformer's block."""
    u = _linear(p, _normed(p, t, C), C)
    s = p.let(
        p.choice(f"{t} + {u}", f"{u} + {t}", f"{t} + {u} + {p.tensor(C)}", f"{t} + {u} * 0.5", f"{t} - {u}")
    )
    if p.chance(0.25):
        p.add(s)
    n = p.let(f"F.layer_norm({s}, ({C},), {p.tensor(C)}, {p.tensor(C)})")
    if p.chance(0.15):
        p.add(n)
    v = _linear(p, n, C)
    if p.chance(0.15):
        p.add(v)
    if p.chance(0.1):
        v = p.let(f"{v} * 0.5")
    return p.choice(f"{v} + {s}", f"{s} + {v}", f"{s} + {v} + {s}", f"{v} + {n}", f"({v} + {s}) / 2.0")


MODULATED = """
{n} * (1 + {scale}) + {shift}
{n} * (1 + {scale}) + {shift}
(1 + {scale}) * {n} + {shift}
{n} * {scale} + {shift}
({n} + {shift}) * {scale}
{shift} + {n}
"""


def _modulated(p: Program, t: str, C: int) -> str:
    """A norm, times and plus vectors of an embedding; a gated sum."""
    N = p.shape(t)[0]
    e = p.let(f"F.linear(F.silu({p.tensor(N, 6)}), {p.tensor(3 * C, 6, scale=0.4)}, {p.tensor(3 * C)})")
    scale, shift, gate = (
        p.let(f"{e}[:, {i * C}:{i * C + C}]{p.choice('[:, None]', '.unsqueeze(1)')}") for i in range(3)
    )
    n = _normed(p, t, C)
    y = p.one_of(MODULATED, n=n, scale=scale, shift=shift)
    y = _linear(p, p.let(y), C)
    return p.choice(
        f"{t} + {gate} * {y}",
        f"{t} + {y} * {gate}",
        f"{gate} * {y} + {t}",
        f"{t} - {gate} * {y}",
        f"{t} + torch.tanh({gate}) * {y}",
    )


PRODUCTS = """
{t} @ {w}.t() + {b}
{t} @ {w}
{b} + {t} @ {w}.t()
torch.matmul({t}, {w}.t()) * 0.5 + {b}
torch.addmm({b}, {t}.reshape(-1, {C}), {w}.t()).reshape{shape}
torch.addmm({b}, {t}.reshape(-1, {C}), {w}, beta=0.5).reshape{shape}
F.linear({t}, {w}) + {b}
F.gelu(F.linear({t}, {w}, {b}), approximate='tanh')
torch.bmm({t}, {t}.transpose(1, 2) @ {t}) / {S}
F.linear(F.silu({t}), {w}, {b})
F.linear({t}[:, :1], {w}, {b}).expand_as({t})
F.linear({t}.flatten(0, 1), {w}, {b}).view_as({t})
F.linear(torch.cat([{many}, torch.sin({many})], -1), {wide}, {b})[-{N}:]
F.linear(torch.cat([{many}, torch.sin({many})[..., :4]], -1), {wide}[:, :{C} + 4], {b})[:{N}]
{t} + F.linear(torch.cat([torch.sin({many}[:, :1]), {many}[:, 1:]], 1), {w}[:1])[:{N}]
F.linear(torch.cat([{t}, torch.sin({t})], -1), {wide}, {b})
"""


def _one_product(p: Program, t: str, C: int) -> str:
    shape = p.shape(t)
    w, wide = (p.tensor(C, K, scale=K**-0.5) for K in (C, 2 * C))
    sizes = {"shape": shape, "N": shape[0], "S": shape[1], "C": C}
    return p.one_of(PRODUCTS, t=t, many=f"{t}.repeat(9, 1, 1)", w=w, wide=wide, b=p.tensor(C), **sizes)


@step(ANY)
def few_rows(p: Program, x: str) -> None:
    """Embeddings: products of few rows after an activation, with one more bias or sum."""
    N, C = p.shape(x)[0], channels(p, x)
    h = p.let(f"F.linear({p.tensor(N, 6, kind='x')}, {p.tensor(C, 6, scale=0.4)}, {p.tensor(C)})")
    act = p.choice("F.silu({})", "F.silu({})", "F.gelu({})", "{}").format(h)
    if p.chance(0.2):
        act = p.let(act)
    e = p.let(f"F.linear({act}, {p.tensor(C, C, scale=C**-0.5)}, {p.tensor(C)})")
    two = f"{e} + {p.tensor(C)} + {p.tensor(C)}"
    e = p.let(p.choice(e, two, f"{e} + {h}", f"{e} + {p.tensor(C)}", f"{e} * 2", f"{p.tensor(C)} + {e}"))
    p.add(f"{x} + {e}[:, None]" if p.value(x).dim() == 3 else f"{x} + {e}{ones(p, x)}")


# ---- views, copies and writes


VIEWS = """
{x}.clone()
{x}.contiguous()
{x}[:, :, -2:]
{x}[:, 1:]
{x}[:, ::2]
{x}.transpose(1, 2).contiguous().transpose(1, 2)
{x}.transpose(-1, -2).reshape{shape}
{x}.reshape({shape}[0], -1).reshape{shape}
{x}.view{shape}
{x}.flip(1)
{x}.roll(1, 2)
{x}.detach()
{x}.unsqueeze(0).squeeze(0)
{x}[:, :1].expand_as({x})
torch.stack([{x}, {x}], 1).sum(1)
torch.cat([{x}[:, :1], {x}[:, 1:]], 1)
torch.cat([{x}[:, 1:], {x}[:, :1]], 1)
torch.cat({x}.chunk(2, 1), 1)
torch.cat({x}.chunk(2, 1)[::-1], 1)
torch.cat({x}.split(1, 2), 2)
"""


@step(ANY, 2)
def view(p: Program, x: str) -> None:
    p.add(p.one_of(VIEWS, x=x, shape=p.shape(x)))


NUMBERS = """
{x} * 0.5
{x} / 1.0
{x} + 0
{x} * 1
{x} - 0.0
{x} / 2
-{x}
1 - {x}
{x}.clamp(-1, 1)
{x} * {x}.abs()
torch.where({mask}, {x}, 0.5)
{x}.masked_fill({mask}, 0.0)
F.softmax({x}, -1)
{x} - {x}.mean(1, keepdim=True)
F.dropout({x}, 0.5, False)
{x} * torch.arange({last}).to({x}.dtype)
torch.tensor([0.5] * {last}).to({x}.dtype) + {x}
F.glu({x}, 1)
F.avg_pool2d({x}, 2)
{x}.sin()
{x} + torch.randn({last}).to({x}.dtype)
"""


@step(ANY, 2)
def number_or_mask(p: Program, x: str) -> None:
    p.add(p.one_of(NUMBERS, x=x, mask=mask(p, x), last=p.shape(x)[-1]))


@step(ANY)
def rounded(p: Program, x: str) -> None:
    p.add(cast(p, x))


WRITES = """
{x}.add_({y})
{x}.mul_(0.5)
{x}.copy_({y})
{x}.clamp_(-2, 2)
{x}.lerp_({y}, 0.5)
{x}.div_({y}.abs() + 1)
{x}.masked_fill_({mask}, 0.5)
{x}.detach().add_(0.5)
F.silu({x}, inplace=True)
F.relu({x}, inplace=True)
torch.add({y}, 1.0, out={x})
torch.mul({y}, {y}, out={x})
torch.cat([{y}[:, :1], {y}[:, 1:]], 1, out={x})
{x}[:, :1] = 2.0
{x}[:, :1] = {y}[:, -1:]
{x}[:, -1] = {x}[:, 0]
{x}[:, 0].zero_()
{x}[..., ::2] += 1
{x}.transpose(1, 2)[:, :1].add_(1)
{x}.flatten(1)[:, :2] *= 2.0
{x}.unbind(1)[0].mul_(3)
{x}.chunk(2, -1)[0].sub_(1)
{x}.movedim(1, -1)[..., :1].copy_({x}.movedim(1, -1)[..., -1:])
"""


@step(ANY, 3)
def written(p: Program, x: str) -> None:
    """A write in place, whole or in part."""
    if p.is_writable(x):
        p.do(p.one_of(WRITES, x=x, y=p.other(x), mask=mask(p, x)))


MADE = """
{x} * 1.5
torch.zeros_like({x})
{x}.clone()
F.silu({x})
"""
KEPT = """
{t}.clone()
{t}.contiguous()
{t}.transpose(1, 2).contiguous()
{t}.movedim(1, -1).contiguous()
{t}.movedim(1, -1).contiguous().movedim(-1, 1)
{t}.permute({same}).contiguous()
{t}[:, :1].contiguous()
{t}[:, ::2].contiguous()
{t}[:, :, -1:].contiguous()
{t}[:1].contiguous()
{t}[:, 0].contiguous()
{t}.chunk(2, 1)[0].contiguous()
{t}[:, :1].expand_as({t}).contiguous()
{t}[:, :1].expand_as({t})
{t}[:, :1]
{t}.reshape(-1)
{t}.view(-1).view{shape}
{t}.transpose(1, 2).reshape{shape}
{t}.flatten(1)
{t}.transpose(1, 2).flatten(1)
{t}.unflatten(0, (1, -1))
{t}.movedim(1, -1)
{t}.to({t}.dtype)
{t}.type_as({x})
{t}.double().to({t}.dtype)
"""
BASE_WRITES = """
{t}.mul_(2)
{t}.zero_()
{t}[:, :1] = 3.0
{t}.add_({t}.mean())
{t}[:, :, -1].add_(1)
"""


@step(ANY, 2)
def kept_and_written(p: Program, x: str) -> None:
    """A view or a copy that is kept, then a write to its base or to itself."""
    shape = p.shape(x)
    t = p.tensor(*shape, kind="x") if p.chance(0.3) else p.let(p.one_of(MADE, x=x))
    if p.chance(0.4):
        p.do(p.one_of(BASE_WRITES, t=t))
    kept = p.let(p.one_of(KEPT, t=t, x=x, shape=shape, same=tuple(range(len(shape)))))
    p.do(p.one_of(BASE_WRITES, t=t))
    if p.chance(0.3) and p.is_writable(kept):
        p.do(p.choice(f"{kept}.add_(1)", f"{kept}[:1] = 0.5", f"{kept}.mul_({kept})"))
    if p.chance(0.6):
        p.add(t)
    if p.shape(kept) == shape:
        p.add(f"{kept} + {x}")
    elif p.value(kept).dim() in ANY:
        p.add(kept)


@step(ANY)
def filled_in_parts(p: Program, x: str) -> None:
    """A new tensor that is written in parts, as tiles and buffers are."""
    shape, y = p.shape(x), p.other(x)
    new = p.choice(
        f"torch.zeros_like({x})",
        f"torch.empty_like({x})",
        f"{x}.new_zeros({shape})",
        f"torch.full({shape}, 0.5, dtype={x}.dtype)",
        f"{x}.clone()",
    )
    t = p.let(new)
    if "empty" in new:
        p.do(f"{t}[:, :1] = {x}[:, :1]")
        p.do(f"{t}[:, 1:] = {y}[:, 1:] * 0.5")
    else:
        p.do(f"{t}[:, :, :1] = {x}[:, :, :1]" if p.chance(0.7) else f"{t}[:, :, 0] += {x}[:, :, -1]")
        if p.chance(0.4):
            p.add(p.let(f"{t}.clone()"))
        if p.chance(0.6):
            p.do(
                p.choice(
                    f"{t}[:, -1] = {y}[:, 0]",
                    f"{t}[..., 1:] += {y}[..., 1:]",
                    f"{t}[:, :, :1].mul_({t}[:, :, :1])",
                )
            )
    p.add(t)


@step(ANY)
def state_written(p: Program, x: str) -> None:
    """A write to a tensor of the module, and a read of it."""
    if p.chance(0.4):
        t = p.tensor(channels(p, x), kind="p")
        p.do(p.choice(f"{t}.add_(1)", f"{t}[:2] = 0.25", f"{t}.mul_(0.5)"))
        p.add(f"{x} + {t}" if p.value(x).dim() == 3 else f"{x} + {t}[:{', None' * (p.value(x).dim() - 2)}]")
