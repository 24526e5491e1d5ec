"""What the steps of random programs have in common: the list of steps, and parts of what they write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.plans.programs import Program

Step = Callable[[Program, str], None]
# Ranks of the tensor that a step reads -> the steps, each as often as it should occur.
STEPS: dict[tuple[int, ...], list[Step]] = {}
IMAGES, VIDEOS, SPATIAL, TOKENS, ANY = (4,), (5,), (4, 5), (3,), (3, 4, 5)


def step(ranks: tuple[int, ...], times: int = 1) -> Callable[[Step], Step]:
    def add(function: Step) -> Step:
        STEPS.setdefault(ranks, []).extend([function] * times)
        return function

    return add


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


LAST_NORMS = """
F.rms_norm({v}, ({C},), {w}, 1e-6)
F.rms_norm({v}, ({C},))
F.layer_norm({v}, ({C},), {w}, {b})
F.layer_norm({v}, ({C},))
F.layer_norm({v}, {last})
"""
