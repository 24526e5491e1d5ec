"""Steps of tokens: attention, products, norms of the last axis, rotary embedding."""

from __future__ import annotations

from tests.plans.program_steps.parts import (
    ANY,
    LAST_NORMS,
    SPATIAL,
    TOKENS,
    cast,
    channels,
    convolved,
    flat,
    grouped,
    ones,
    roots,
    step,
    unflat,
)
from tests.plans.programs import Program


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


def attended(p: Program, t: str, residual: str) -> str:
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
    y = attended(p, _normed(p, t, C), t)
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
