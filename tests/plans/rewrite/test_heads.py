"""Heads of attention: norm and rotation as one step, parts written side by side, and near misses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import TOLERANCES, checked, steps_of

B, H, D = 2, 3, 8
TEXT, IMAGE = 4, 5
S = TEXT + IMAGE
text, image = torch.randn(B, TEXT, H, D), torch.randn(B, IMAGE, H, D)
cos, sin = (torch.randn(1, S, 1, D) for _ in range(2))
weights = nn.ParameterList([nn.Parameter(torch.randn(D)) for _ in range(2)])
SWAP = 1, 2


def rms(x, weight, eps=1e-6):
    """As diffusers' RMSNorm, which computes in fp32."""
    y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight.to(x.dtype)


def whole(x, weight, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def rotated(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return (x.float() * cos + torch.stack((-b, a), -1).flatten(-2).float() * sin).to(x.dtype)


def rotated_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    return (x.float() * cos + torch.cat((-b, a), -1).float() * sin).to(x.dtype)


def by_complex(x, angles):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    table = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


def attend(q, k, v):
    return F.scaled_dot_product_attention(*(t.transpose(*SWAP) for t in (q, k, v)))


class Norms(nn.Module):
    """``function(norms, *inputs)``, where ``norms`` are the weights of text and image."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weights = weights

    def forward(self, *inputs):
        return self.function(self.weights, *inputs)


def plan(function, *inputs, **options):
    return checked(Norms(function), *inputs, **options)


def without_casts(found):
    """The steps; in 16 bits, weights are cast."""
    return [name for name in found.steps if name != "cast"]


def parts_of(found):
    """What each part of each ``join_heads`` has: "norm", "rotation", "both" or "copy"."""
    names = {(False, False): "copy", (True, False): "norm", (False, True): "rotation", (True, True): "both"}
    joins = found.all(steps.join_heads)
    return [[names[p[3] is not None, p[1] is not None] for p in n.args[0]] for n in joins]


# ---- one step


@pytest.mark.parametrize("norm", [rms, whole])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_and_rotation(norm, dtype):
    found = plan(lambda w, x, c, s: rotated(norm(x, w[0]), c, s), image.to(dtype), cos[:, :IMAGE], sin[:, :1])
    assert without_casts(found) == ["rotate"]
    assert found.only(steps.rotate).args[4] == pytest.approx(1e-6)


def test_pairs_of_halves():
    """In one step with the norm, and beside other tokens before or after the concatenation."""
    c, s = cos[:, :IMAGE], sin[:, :IMAGE]
    found = plan(lambda w, x, c, s: rotated_halves(rms(x, w[0]), c, s), image, c, s)
    assert found.steps == ["rotate"]

    def before(w, x, y, c, s):
        return torch.cat([rms(x, w[0]), rotated_halves(rms(y, w[1]), c[:, TEXT:], s[:, TEXT:])], 1)

    def after(w, x, y, c, s):
        return rotated_halves(torch.cat([rms(x, w[0]), rms(y, w[1])], 1), c, s)

    found = [plan(call, text, image, cos, sin) for call in (before, after)]
    assert [each.steps for each in found] == [["join_heads"]] * 2
    assert [[part[5] for part in each.only(steps.join_heads).args[0]] for each in found] == [
        [False, True],
        [True, True],
    ]


def test_norm_with_other_readers_is_computed_twice():
    def call(w, x, c, s):
        y = rms(x, w[0])
        return rotated(y, c, s), y

    assert plan(call, text, cos[:, :TEXT], sin[:, :TEXT]).steps == ["channel_norm", "rotate"]


@pytest.mark.parametrize(
    "moved",
    [
        lambda x, w: rms(x.transpose(*SWAP), w),
        lambda x, w: rms(x, w).transpose(*SWAP),
        lambda x, w: x.transpose(*SWAP),
    ],
)
def test_heads_before_tokens(moved):
    """The heads of a token lie side by side in the result, as where tokens are before heads."""

    def call(w, x, c, s):
        return rotated(moved(x, w[0]), c.transpose(*SWAP), s.transpose(*SWAP))

    found = plan(call, image, torch.randn(1, IMAGE, H, D), sin[:, :IMAGE])
    assert found.steps == ["rotate"]
    assert found.only(steps.rotate).meta["shape"] == (B, IMAGE, H, D)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x, w: rms(x, w) * 2,
        lambda x, w: (
            rms(x.transpose(*SWAP).flatten(2), w.repeat(IMAGE)).unflatten(2, (IMAGE, D)).transpose(*SWAP)
        ),
        lambda x, w: rms(x.mT, w[:1]).mT,
        lambda x, w: F.layer_norm(x, (H, D)) * w,
        lambda x, w: F.layer_norm(x, (D,)) * 2,
        lambda x, w: F.normalize(x, dim=-1) * w,
        lambda x, w: rms(x, w).relu(),
    ],
)
def test_other_norms_stay_steps_of_their_own(norm):
    found = plan(lambda w, x, c, s: rotated(norm(x, w[0]), c, s), image, cos[:, :IMAGE], sin[:, :IMAGE])
    assert "rotate" in found.steps
    assert len(found.steps) > 1


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: F.layer_norm(x, (D,), eps=1e-5),
        lambda x, w: F.layer_norm(x, (D,), w),
        lambda x, w: F.layer_norm(x, (D,), w, w),
        lambda x, w: F.layer_norm(x.float(), (D,), w.float()).type_as(x),
        lambda x, w: rms(x, w) + w,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_and_biases(norm, dtype):
    """Before a rotation, before attention, and in a part of joined heads."""
    w = nn.Parameter(torch.randn(D, dtype=dtype))
    c, s = cos[:, :IMAGE], sin[:, :IMAGE]
    x, y = image.to(dtype), text.to(dtype)
    found = checked(lambda x, c, s: rotated(norm(x.transpose(*SWAP), w).transpose(*SWAP), c, s), x, c, s)
    assert without_casts(found) == ["rotate"]
    found = checked(lambda x: attend(norm(x, w), x, x), x)
    assert without_casts(found) == ["rotate", "attention"]
    found = checked(lambda x, y: torch.cat([norm(x, w), y], 1), x, y)
    assert parts_of(found)[0][1:] == ["copy"]
    assert without_casts(found) == ["join_heads"]


def test_a_norm_after_the_rotation_is_another_value():
    found = plan(lambda w, x, c, s: rms(rotated(x, c, s), w[0]), image, cos[:, :IMAGE], sin[:, :IMAGE])
    assert found.steps == ["rotate", "channel_norm"]


def test_norms_before_attention_take_strided_rows():
    """In either order of tokens and heads, the heads of a token lie side by side in the result."""

    def call(w, x):
        q, k, v = x.unflatten(-1, (3, H, D)).unbind(2)
        q, k, v = rms(q, w[0]).transpose(*SWAP), rms(k.transpose(*SWAP), w[1]), v.transpose(*SWAP)
        return F.scaled_dot_product_attention(q, k, v)

    found = plan(call, torch.randn(B, S, 3 * H * D))
    assert found.steps == ["rotate", "rotate", "attention"]
    assert all(n.meta["shape"] == (B, S, H, D) for n in found.all(steps.rotate))


# ---- side by side


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_text_first", [True, False])
def test_joined_before_the_rotation(is_text_first, dtype):
    def call(w, x, y, c, s):
        parts = rms(x, w[0]), rms(y, w[1])
        return rotated(torch.cat(parts[:: 1 if is_text_first else -1], 1), c, s)

    found = plan(call, text.to(dtype), image.to(dtype), cos, sin)
    assert without_casts(found) == ["join_heads"]
    assert parts_of(found) == [["both", "both"]]


def test_joined_after_the_rotation():
    def call(w, x, y, a):
        return torch.cat([by_complex(rms(x, w[0]), a[:TEXT]), by_complex(rms(y, w[1]), a[TEXT:])], 1)

    found = plan(call, text, image, torch.randn(S, D // 2))
    assert parts_of(found) == [["both", "both"]]
    assert "cat" not in found.steps


@pytest.mark.parametrize("size", [D, 7])
def test_joined_without_a_rotation(size):
    """Tokens behind heads, as concatenations of heads often are. An odd head size needs no pairs."""
    w = [nn.Parameter(torch.randn(size)) for _ in range(2)]
    call = lambda x, y: torch.cat([rms(x.transpose(*SWAP), w[0]), rms(y.transpose(*SWAP), w[1])], 2)  # noqa: E731
    found = checked(call, text[..., :1].expand(B, TEXT, H, size).contiguous(), torch.randn(B, IMAGE, H, size))
    assert parts_of(found) == [["norm", "norm"]]
    assert found.steps == ["join_heads"]
    assert found.only(steps.join_heads).meta["shape"] == (B, S, H, size)


def test_a_part_without_rotation_and_a_cut_rotation():
    def call(w, x, c, s):
        y = rms(x, w[0]).transpose(*SWAP)
        c, s = c.transpose(*SWAP), s.transpose(*SWAP)
        turned = rotated(y[:, :, :-TEXT], c[:, :, :IMAGE], s[:, :, :IMAGE])
        return torch.cat([turned, y[:, :, -TEXT:]], 2), torch.cat([rotated(y, c, s)[:, :, 2:], y], 2)

    found = plan(call, torch.randn(B, S, H, D), cos, sin)
    assert parts_of(found) == [["both", "norm"], ["both", "norm"]]
    assert found.steps == ["join_heads"] * 2


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (slice(TEXT, None), ["copy", "rotation"]),
        (slice(0, IMAGE), ["rotation", "copy"]),
        (slice(1, 3), ["copy", "rotation", "copy"]),
    ],
)
def test_rotated_tokens_that_overwrite_a_part(tokens, expected, is_swapped):
    def call(w, x, c, s):
        x, c, s = (t.transpose(*SWAP) if is_swapped else t for t in (x, c, s))
        part = (..., tokens, slice(None)) if is_swapped else (slice(None), tokens)
        return overwritten(x, rotated((x * 2)[part], c[part], s[part]), part)

    found = plan(call, torch.randn(B, S, H, D), cos, sin)
    assert found.steps == ["aten.mul", "join_heads"]
    assert parts_of(found) == [expected]


def overwritten(x, part, where):
    y = x * 2
    y[where] = part
    return y


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: overwritten(x, y[:, :3] + 1, (slice(None), slice(1, 4))),
        lambda x, y: overwritten(x, y[:, :3], (slice(None), slice(0, 6, 2))),
        lambda x, y: overwritten(x, y[..., :2], (..., slice(1, 3))),
        lambda x, y: overwritten(x, y[:1], slice(1, 2)),
        lambda x, y: overwritten(x, y[:, 0], (slice(None), 1)),
    ],
)
def test_other_writes(call):
    found = plan(lambda w, x, c, s: call(x, rotated(x, c, s)), torch.randn(B, S, H, D), cos, sin)
    assert "rotate" in found.steps


def test_new_memory_is_written_in_place():
    def call(w, x, c, s):
        y = torch.zeros_like(x)
        y[:, 1:] = rotated(x[:, 1:], c[:, 1:], s[:, 1:])
        return y

    assert plan(call, torch.randn(B, S, H, D), cos, sin).steps == ["aten.full", "rotate", "write_slice_"]


def test_tables_of_one_row_and_of_each_sample():
    call = lambda w, x, y, c, s: rotated(torch.cat([rms(x, w[0]), rms(y, w[1])], 1), c, s)  # noqa: E731
    found = plan(call, text, image, torch.randn(1, 1, H, D), torch.randn(B, S, 1, D))
    assert parts_of(found) == [["both", "both"]]


def test_queries_keys_and_values_of_attention():
    def call(w, x, y, c, s):
        q = rotated(torch.cat([rms(x[0], w[0]), rms(y[0], w[1])], 1), c, s)
        k = rotated(torch.cat([x[1], y[1]], 1), c, s)
        return attend(q, k, torch.cat([x[2], y[2]], 1))

    found = plan(call, torch.randn(3, B, TEXT, H, D), torch.randn(3, B, IMAGE, H, D), cos, sin)
    assert sorted(found.steps) == ["attention", *["join_heads"] * 3]
    assert sorted(parts_of(found)) == [["both"] * 2, ["copy"] * 2, ["rotation"] * 2]


def test_attention_reads_joined_heads_without_a_copy():
    """The heads of a token lie side by side, in whichever order tokens and heads are joined."""

    def call(w, x, y):
        q = torch.cat([rms(x.transpose(*SWAP), w[0]), rms(y.transpose(*SWAP), w[1])], 2)
        return F.scaled_dot_product_attention(q, q, torch.cat([x.transpose(*SWAP), y.transpose(*SWAP)], 2))

    found = plan(call, text, image)
    assert sorted(found.steps) == ["attention", "join_heads", "join_heads"]
    assert all(n.meta["shape"] == (B, S, H, D) for n in found.all(steps.join_heads))


# ---- near misses


def test_cats_that_nobody_attends_to():
    assert steps_of(lambda x, y: torch.cat([x, y], 1) * 2, text, image) == ["cat", "aten.mul"]


@pytest.mark.parametrize("dim", [0, 2, 3])
def test_other_axes(dim):
    call = lambda w, x, y: torch.cat([rms(x, w[0]), rms(y, w[1])], dim)  # noqa: E731
    found = plan(call, text, text)
    assert found.steps.count("join_heads") == (dim == 2)
    rotating = lambda w, x, y, c, s: rotated(call(w, x, y), c, s)  # noqa: E731
    size = [1, TEXT, 1, D]
    size[dim] *= 2 if size[dim] > 1 else 1
    plan(rotating, text, text, torch.randn(size), torch.randn(size))


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: (torch.cat([a, b], 1), torch.cat([a, b], 1) * 2),
        lambda a, b: (torch.cat([a, b], 1), a * 2),
        lambda a, b: torch.cat([a, a, b], 1),
        lambda a, b: torch.cat([a[:, :3], a[:, 1:], b], 1),
        lambda a, b: torch.cat([a[:, :0], b, a[:, 1:2]], 1),
        lambda a, b: torch.cat([torch.cat([a, b], 1), a], 1),
        lambda a, b: torch.cat([a.flip(1), b], 1),
        lambda a, b: torch.cat([a.expand(B, TEXT, H, D), b], 1),
        lambda a, b: torch.cat([a.reshape(B, TEXT * 2, H, D // 2), b.reshape(B, IMAGE * 2, H, D // 2)], 1),
        lambda a, b: torch.cat([a.mT.reshape(B, TEXT, H, D), b], 1),
        lambda a, b: attend(torch.cat([a, b], 1), b, b),
    ],
)
def test_what_else_reads_and_joins_parts(join):
    plan(lambda w, x, y: join(rms(x, w[0]), rms(y, w[1])), text, image)
    plan(lambda w, x, y, c, s: join(rotated(rms(x, w[0]), c, s), y), text, image, cos[:, :TEXT], sin[:, :1])


def test_joined_heads_with_other_readers():
    def call(w, x, y, c, s):
        both = torch.cat([rms(x, w[0]), rms(y, w[1])], 1)
        return rotated(both, c, s), rotated(rotated(both, s, c), c, s), both.sum(), both[:, 1:3]

    assert "cat" not in plan(call, text, image, cos, sin).steps


def test_arguments_are_copied_and_not_changed():
    call = lambda x, y, v: attend(x, torch.cat([x, y], 1), torch.cat([y, v], 1))  # noqa: E731
    found = checked(call, text, image, text)
    assert parts_of(found) == [["copy"] * 2] * 2


def test_fp64_has_no_kernel():
    call = lambda w, x, y: torch.cat([whole(x, w[0]), whole(y, w[1])], 1)  # noqa: E731
    assert "join_heads" not in plan(call, text.double(), image.double()).steps


def test_errors_are_no_larger_than_stock():
    """In 16 bits, against the same call in fp32."""

    def call(x, y, w, v, c, s):
        return rotated(torch.cat([rms(x, w), rms(y, v)], 1), c, s)

    half = [torch.randn(size).bfloat16() for size in ((2, 20, 4, 64), (2, 30, 4, 64), (64,), (64,))]
    tables = [torch.randn(1, 50, 1, 64) for _ in range(2)]
    w, v = (nn.Parameter(t) for t in half[2:])
    ours = checked(lambda x, y, c, s: call(x, y, w, v, c, s), *half[:2], *tables)
    with torch.no_grad():
        found, stock = ours(*half[:2], *tables), call(*half, *tables)
        exact = call(*(t.float() for t in half), *tables)
    errors = [((t.float() - exact).norm() / exact.norm()).item() for t in (found, stock)]
    assert errors[0] < errors[1] < TOLERANCES[torch.bfloat16]
