"""Steps of videos alone: causal convolutions, chunks of frames, frames as images."""

from __future__ import annotations

import math

from tests.plans.program_steps.parts import VIDEOS, activated, channels, convolved, grouped, roots, step
from tests.plans.program_steps.tokens import attended
from tests.plans.programs import Program


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
        causal = f"F.pad({y}, (1, 1, 1, 1, 2, 0), mode='replicate')"
        p.add(convolved(p, p.let(p.choice(y, causal)), kernel=3, out=C))


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
    y = attended(p, p.let(f"F.layer_norm({t}, ({C},))"), t)
    p.add(f"({y} + {t}).reshape({N}, {H}, {W}, {T}, {C}).permute(0, 4, 3, 1, 2)")


# ---- chunks, borders and zeros


NORMS = ("F.silu(F.group_norm({}, 2))", "F.silu(F.normalize({}, dim=1) * 3)", "F.relu({})", "{}")
BORDERS = ((1, 1, 1, 1), (1, 1, 1, 1), (0, 0, 0, 0), (1, 1, 2, 2), (1, 0, 0, 1))
MODES = (*(", mode='replicate'", "", ", mode='reflect'") * 2, ", value=1.0")


@step(VIDEOS, 2)
def chunks_that_carry_borders(p: Program, x: str) -> None:
    """Chunks of frames with borders, each after the last frames of the one before it, with their borders."""
    C, T = p.shape(x)[1:3]
    weight, bias = p.tensor(C, C, 3, 3, 3, scale=0.2 / C**0.5, last=p.chance(0.8)), p.tensor(C)
    norm, border, mode, size = p.choice(*NORMS), p.choice(*BORDERS), p.choice(*MODES), p.choice(1, 1, 2)
    kept, parts = "", []
    for i in range(0, T, size):
        front = 0 if kept and p.chance(0.95) else 2
        how = p.choice(*MODES) if p.chance(0.05) else mode
        v = p.let(norm.format(f"{x}[:, :, {i}:{i + size}]"))
        v = p.let(f"F.pad({v}, {(*border, front, 0)}{how})")
        if kept:
            v = p.let(f"torch.cat([{kept}, {v}], 2)")
        part = "[:, :, -2:]" if p.chance(0.9) else p.choice("[:, :, :2]", "[:, :, -3:-1]")
        kept = p.let(f"{v}{part}{p.choice('.clone()', '.clone()', '')}")
        if p.chance(0.05):
            p.add(p.choice(v, kept))
        parts.append(p.let(f"F.conv3d({v}, {weight}, {bias})"))
    p.add(f"torch.cat([{', '.join(parts)}], 2)")


SIDE_BY_SIDE = """
torch.cat([torch.zeros_like({v}[:, :, :2]), {v}], 2)
torch.cat([{v}.new_zeros({two}), torch.cat([{cache}, {v}], 2)], 2)
torch.cat([{v}.new_zeros({two}), {v}, {v}.new_zeros({two})], 2)
torch.cat([{v}.new_zeros({two}), {v}, {cache}], 2)
torch.cat([{v}, {v}.new_zeros({two}), {cache}], 2)
torch.cat([torch.full_like({v}[:, :, :2], 0.5), {v}], 2)
torch.cat([torch.zeros_like({v}), {v}], 1)
torch.cat([F.pad({v}, {a}{mode}), F.pad({cache}, {a}{mode})], 2)
torch.cat([F.pad({v}, {a}{mode}), F.pad({cache}, {b}{mode})], 2)
torch.cat([F.pad({v}, {b}{mode}), F.pad({cache}, {a}{mode})], 2)
torch.cat([F.pad({v}, {a}{mode}), F.pad({cache}, {a}{other})], 2)
torch.cat([F.pad({v}, {a}{mode}), F.pad({v}, {a}{mode})], {dim})
F.pad({v}, {a}{mode})[:, :, -2:].clone()
F.pad({v}, {a}{mode})[:, :, 1:3].clone()
F.pad({v}, {a}{mode})[:, :, 1:-1].clone()
F.pad({v}, {a}{mode})[:, :, :2].clone()
F.pad({v}, {a}{mode})[..., 1:4, :].clone()
F.pad({v}, {a}{mode})[:, :2].clone()
"""


@step(VIDEOS, 3)
def frames_beside_frames(p: Program, x: str) -> None:
    """Zeros and padded frames beside others, copies of parts of padded frames; then often a convolution."""
    N, C, _, H, W = p.shape(x)
    v = p.let(p.choice(*NORMS).format(x))
    left, right, top, bottom = p.choice(*BORDERS)
    border = (left + right, 0, 0, top + bottom) if p.chance(0.5) else (left, right, top, bottom)
    a = (left, right, top, bottom, *p.choice((0, 0), (2, 0), (2, 0), (1, 2)))
    b = (*border, *p.choice((0, 0), (0, 0), (0, 1), (2, 0)))
    names = {"cache": p.tensor(N, C, 2, H, W, kind="x"), "two": (N, C, 2, H, W), "dim": p.choice(1, 2, 3)}
    modes = {"mode": p.choice(*MODES), "other": p.choice(*MODES)}
    y = p.let(p.one_of(SIDE_BY_SIDE, v=v, a=a, b=b, **names, **modes))
    if p.chance(0.3):
        p.add(p.choice(y, v, f"{y}[:, :, -2:].clone()", f"{y}[:, :, :1]"))
    if p.chance(0.7) and p.shape(y)[2] > 2:
        y = p.let(convolved(p, y, kernel=3, out=C, padding=(0, 1, 1)))
    p.add(y)


# ---- convolutions of parts, of one frame, and of upsampled frames


@step(VIDEOS, 2)
def conv_in_parts(p: Program, x: str) -> None:
    """Convolutions of successive parts of a video, which overlap, side by side."""
    N, C, _, H, W = p.shape(x)
    v, cache = p.let(p.choice(*NORMS).format(x)), p.tensor(N, C, 2, H, W, kind="x")
    y = p.let(p.choice(f"torch.cat([{cache}, {v}], 2)", f"F.pad({v}, (0, 0, 0, 0, 2, 0))", v))
    weights = [p.tensor(C, C, 3, 3, 3, scale=0.2 / C**0.5, last=True)] * 3 + [p.tensor(C, C, 3, 3, 3)]
    length, stride = p.choice(3, 3, 4), p.choice(1, 1, 2)
    each = stride * ((length - 3) // stride + 1) if p.chance(0.8) else p.choice(1, 2)
    starts = [*range(p.choice(0, 0, 1), p.shape(y)[2] - length + 1, each)]
    if p.chance(0.1):
        starts = starts[::-1]
    more = f"{p.choice('None', p.tensor(C))}, stride={(stride, 1, 1)}, padding={p.choice((0, 1, 1), 0, 1)}"
    last = p.choice(*weights)
    parts = [
        p.let(f"F.conv3d({y}[:, :, {s}:{s + length}], {last if s == starts[-1] else weights[0]}, {more})")
        for s in starts
    ]
    if p.chance(0.2):
        p.add(p.choice(y, *parts))
    p.add(f"torch.cat([{', '.join(parts)}], {p.choice(2, 2, 2, 2, 1)})")


ONE_FRAME = """
F.conv3d({v}, {w}[:, :, -1:], {b}, padding=(0, 1, 1))
F.conv3d({v}, {w}[:, :, -1:], {b}, padding=(0, 1, 1))
F.conv3d({v}, {w}[:, :, 2:], {b}, stride=(2, 1, 2), padding=(0, 1, 1))
F.conv3d({v}, {w}[:, :, 1:2], {b}, padding=(0, 1, 1))
F.conv3d({v}, {w}[:, :, :1], {b}, padding=(0, 1, 1))
F.conv3d({v}, {w}[:, :, -1:], {b}, padding=1)
F.conv3d({v}, {w}[:, :, :, -1:], {b}, padding=1)
F.conv3d(F.pad({v}, (1, 1, 1, 1, 2, 0)), {w}, {b})
F.conv3d(torch.cat([torch.zeros_like({v})] * 2 + [{v}], 2), {w}, {b}, padding=(0, 1, 1))
"""


@step(VIDEOS)
def conv_of_one_frame(p: Program, x: str) -> None:
    """The first frame, as an image that meets a part of the weight; sometimes all frames."""
    C = channels(p, x)
    v = p.let(p.choice(*NORMS).format(f"{x}[:, :, :1]" if p.chance(0.8) else x))
    w = p.tensor(C, C, 3, 3, 3, scale=0.2 / C**0.5, last=p.chance(0.8))
    p.add(p.one_of(ONE_FRAME, v=v, w=w, b=p.choice("None", p.tensor(C))))


FIRST_FRAME = "F.interpolate({v}[:, :, 0], scale_factor=2.0)[:, :, None]"
UPSAMPLED_FRAMES = (
    "F.interpolate({v}, scale_factor=(2.0, 1.0, 1.0))",
    "F.interpolate({v}, scale_factor=(1.0, 2.0, 2.0))",
    "F.interpolate({v}, scale_factor=2.0)",
    f"torch.cat([{FIRST_FRAME}, F.interpolate({{v}}[:, :, 1:], scale_factor=2.0)], 2)",
    f"torch.cat([{FIRST_FRAME}, F.interpolate({{v}}[:, :, 1:], scale_factor=(1.0, 2.0, 2.0))], 2)",
    "{v}",
)
AFTER_FRAMES = """
F.pad({y}, (0, 0, 0, 0, 2, 0), mode='replicate')
F.pad({y}, (0, 0, 0, 0, 2, 0), mode='replicate')
F.pad({y}, (0, 0, 0, 0, 1, 1), mode='replicate')
F.pad({y}, (0, 0, 0, 0, 2, 0))
F.pad({y}, (0, 0, 0, 0, 2, 0), value=1.0)
F.pad({y}, (1, 1, 1, 1, 2, 0), mode='replicate')
torch.cat([{y}[:, :, :1]] * 2 + [{y}], 2)
torch.cat([{y}, {y}[:, :, -1:], {y}[:, :, -1:]], 2)
torch.cat([{cache}, {y}], 2)
"""


@step(VIDEOS, 2)
def upsampled_and_padded(p: Program, x: str) -> None:
    """Upsampling, pads along time, and a convolution, with norms between them; others read the frames too."""
    C = channels(p, x)
    if math.prod(p.shape(x)) > 1500:
        return
    v = p.let(p.choice(*NORMS).format(x if p.chance(0.4) else f"{x}[:1]"))
    y = p.let(p.choice(*UPSAMPLED_FRAMES).format(v=v))
    N, _, _, *size = p.shape(y)
    z = p.let(p.one_of(AFTER_FRAMES, y=y, cache=p.tensor(N, C, 2, *size, kind="x")))
    if p.chance(0.25):
        z = p.let(p.choice(*NORMS).format(z))
    groups, k = p.choice(1, 2), p.choice(1, 1, 3)
    weight = p.tensor(C, C // groups, 3, k, k, scale=0.5 / C**0.5, last=p.chance(0.8))
    h = p.let(f"F.conv3d({z}, {weight}, {p.tensor(C)}, padding={(0, k // 2, k // 2)}, groups={groups})")
    if p.chance(0.3):
        p.add(p.choice(y, y, z, v, f"{y}[:, :, -1:]", f"{z}[:, :, -2:].clone()"))
    p.add(f"{h} + {y}" if p.shape(h) == p.shape(y) and p.chance(0.6) else h)


# ---- masks of frames


ROWS = """
for i in range({S}): {m}[i, : (i // {n} + 1) * {n}] = {seen}
for i in range({S}): {m}[i, : (i // {n} + 1) * {n}] = {seen}
for i in range({S}): {m}[i, : (i // {n} + 1) * {n}] = {seen}
for i in range({S}): {m}[i, : (i // {n}) * {n} + 1] = {seen}
for i in range({S}): {m}[i, (i // {n}) * {n} :] = {seen}
for i in range({S}): {m}[i, (i // {n}) * {n} :] = {seen}
for i in range({S}): {m}[:, i][: (i // {n} + 1) * {n}] = {seen}
for i in range({S}): {m}[{S} - 1 - i, : (i // {n} + 1) * {n}] = {seen}
for i in range({S}): {m}[i, : (i % 3 + 1) * {n}] = {seen}
"""


@step(VIDEOS, 2)
def attention_to_earlier_frames(p: Program, x: str) -> None:
    """Attention with a mask that hides later frames; sometimes another mask, or none."""
    N, C, T, H, W = p.shape(x)
    S, n = T * H * W, p.choice(H * W, H * W, H * W, 4)
    if S > 200 or N * C * S > 4000:
        return
    q, k, v = (p.let(f"{convolved(p, x, kernel=1, out=C)}.flatten(2).mT[:, None]") for _ in "qkv")
    rows = p.choice(*ROWS.strip().splitlines())
    keys = 1 if "[i, :" in rows and p.chance(0.1) else S  # one number for all keys
    new, seen = p.choice(
        *[(f"torch.full(({S}, {keys}), -float('inf'), dtype={x}.dtype)", 0)] * 4,
        *[(f"torch.zeros({S}, {keys}, dtype=torch.bool)", True)] * 2,
        (f"torch.full(({S}, {keys}), -2.0, dtype={x}.dtype)", 0),
        (f"torch.zeros({S}, {keys}, dtype={x}.dtype)", 1),
    )
    m = p.let(new)
    p.do(rows.format(S=S, m=m, n=n, seen=seen))
    if p.chance(0.1):
        p.do(p.choice(f"{m}[3, 0] = {m}[0, -1]", f"{m}[:, 1] = {m}[0, -1]", f"{m}[5] = {seen}"))
    batch = f"{m}[None, None].expand({N}, 1, -1, -1)"
    mask = p.choice(*[m] * 4, batch, f"{m}[None]", f"{m}.mT", f"{m}.flip(1)", f"{m}.bool()")
    if p.chance(0.05):
        mask = f"{m}.bool().to({x}.dtype)"
    if p.chance(0.15):
        q, k, v, mask = f"{q}[:, 0]", f"{k}[:, 0]", f"{v}[:, 0]", p.choice(f"{m}[None]", "None", "None")
    elif p.chance(0.1):
        k, v = f"{k}[0]", f"{v}[0]"
    elif p.chance(0.1):
        k, v, mask = f"{k}[:, :, :{n}]", f"{v}[:, :, :{n}]", f"{mask}[..., :{n}]"
    options = p.choice("", "", "", ", scale=0.3", ", scale=0.3", ", is_causal=True")
    y = p.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, {mask}{options})")
    p.add(f"{y}.mT.reshape({p.shape(x)}) + {x}")
