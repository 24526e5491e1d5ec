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
    y = attended(p, p.let(f"F.layer_norm({t}, ({C},))"), t)
    p.add(f"({y} + {t}).reshape({N}, {H}, {W}, {T}, {C}).permute(0, 4, 3, 1, 2)")
