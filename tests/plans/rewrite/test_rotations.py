"""Rotary embeddings in all spellings, and near misses."""

import pytest
import torch

from sdfastgn.plans.run.steps import rotate
from tests.plans.rewrite.rewriting import checked, steps_of

B, S, H, D = 2, 5, 3, 8
HALF, WIDE = torch.bfloat16, torch.float32
x = torch.randn(B, S, H, D)
cos, sin = (torch.randn(1, S, 1, D) for _ in range(2))
angles = torch.randn(S, D // 2)


def turned(x, order=(1, 0), sign=-1):
    pairs = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([sign * pairs[order[0]] if sign != -1 else -pairs[order[0]], pairs[order[1]]], -1)


def stacked(x, cos, sin, **near):
    return (x.float() * cos + turned(x, **near).flatten(-2).float() * sin).to(x.dtype)


def by_halves(x, cos, sin, *, order=(1, 0), sign=-1, axis=-2):
    """As models write it that reshape heads; ``axis`` -1 joins pairs of neighbors in the place of halves."""
    parts = x.unflatten(-1, (2, -1) if axis == -2 else (-1, 2)).unbind(axis)
    first, second = parts[order[0]], parts[order[1]]
    turned = torch.cat([-first if sign == -1 else sign * first, second], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def by_complex(x, table):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


def table_of(angles):
    return torch.polar(torch.ones_like(angles), angles)[None, :, None]


def written(x, cos, sin, *, first=slice(0, None, 2), second=slice(1, None, 2)):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., first] = a * c - b * s
    out[..., second] = a * s + b * c
    return out.type_as(x)


@pytest.mark.parametrize("dtype", [WIDE, HALF])
def test_every_spelling(dtype):
    q = x.to(dtype)
    assert steps_of(stacked, q, cos, sin) == ["rotate"]
    assert steps_of(written, q, cos.to(dtype), sin.to(dtype)) == ["aten.slice", "aten.slice", "cat", "rotate"]
    steps = steps_of(lambda x, angles: by_complex(x, table_of(angles)), q, angles)
    assert steps == ["aten.full", "aten.polar", "rotate"]
    for call in (by_halves, lambda x, cos, sin: x * cos.to(x) + rotate_half(x) * sin.to(x)):
        plan = checked(call, q, cos, sin)
        assert [step for step in plan.steps if step != "cast"] == ["rotate"]
        assert plan.only(rotate).args[3:6] == (None, 0.0, True)


def test_tables_of_pairs_are_joined_once():
    """Both numbers of each pair lie side by side, for all rotations."""
    call = lambda x, y, c, s: [written(t, c, s) for t in (x, y, x * 2)]  # noqa: E731
    found = steps_of(call, x, x + 1, cos, sin)
    assert (found.count("cat"), found.count("rotate")) == (1, 3)
    for other in (torch.randn(B, S, 1, D), sin.to(HALF)):
        assert "cat" not in steps_of(call, x, x + 1, cos, other)


def test_tokens_without_heads():
    tokens, c, s = torch.randn(B, S, D), torch.randn(1, S, D), torch.randn(B, S, D)
    assert steps_of(stacked, tokens, c, s) == ["rotate"]


def test_tables_without_leading_axes():
    assert steps_of(stacked, x.transpose(1, 2).contiguous(), cos[0, :, 0], sin[0, :, 0]) == ["rotate"]


def test_heads_that_are_cut_and_moved():
    def call(x, cos, sin):
        q, k = x.unflatten(-1, (2, H, D)).unbind(2)
        k = stacked(k.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2))
        return stacked(q, cos, sin).transpose(1, 2), k

    assert steps_of(call, torch.randn(B, S, 2 * H * D), cos, sin) == ["rotate", "rotate"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, cos, sin: stacked(x, cos, sin, order=(0, 1)),
        lambda x, cos, sin: stacked(x, cos, sin, order=(1, 1)),
        lambda x, cos, sin: stacked(x, cos, sin, sign=2),
        lambda x, cos, sin: x * cos + turned(x * 2).flatten(-2) * sin,
        lambda x, cos, sin: x * cos - turned(x).flatten(-2) * sin,
        lambda x, cos, sin: torch.add(x * cos, turned(x).flatten(-2) * sin, alpha=2),
        lambda x, cos, sin: x * cos + torch.cat((-x[..., 3:], x[..., :3]), -1) * sin,
        lambda x, cos, sin: x * cos + torch.cat((-x[..., 4:], x[..., 1:5]), -1) * sin,
        lambda x, cos, sin: x * cos + torch.cat((x[..., 4:], -x[..., :4]), -1) * sin,
        lambda x, cos, sin: x * cos + rotate_half(x * 2) * sin,
        lambda x, cos, sin: x * cos - rotate_half(x) * sin,
        lambda x, cos, sin: x * cos + rotate_half(x.unflatten(-1, (2, 4))).flatten(-2) * sin,
        lambda x, cos, sin: x * cos + rotate_half(x.flatten(2)).unflatten(-1, (H, D)) * sin,
        lambda x, cos, sin: by_halves(x, cos, sin, order=(0, 1)),
        lambda x, cos, sin: by_halves(x, cos, sin, order=(1, 1)),
        lambda x, cos, sin: by_halves(x, cos, sin, sign=2),
        lambda x, cos, sin: by_halves(x, cos, sin, axis=-1),
        lambda x, cos, sin: x * cos + turned(x).mT.flatten(-2) * sin,
        lambda x, cos, sin: x * cos[..., :1] + turned(x).flatten(-2) * sin,
        lambda x, cos, sin: written(x, cos, sin, first=slice(0, 4, 1), second=slice(4, 8, 1)),
    ],
)
def test_near_misses(call):
    assert "rotate" not in steps_of(call, x, cos, sin)


def test_written_near_misses():
    def call(x, cos, sin, change):
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[..., 0::2], sin[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2], out[..., 1::2] = change(a, b, c, s)
        return out

    for change in (
        lambda a, b, c, s: (a * c + b * s, a * s + b * c),
        lambda a, b, c, s: (a * c - b * s, a * c + b * s),
        lambda a, b, c, s: (b * c - a * s, a * s + b * c),
        lambda a, b, c, s: (a * c - b * s, a * s + a * c),
    ):
        assert "rotate" not in steps_of(lambda x, c, s, f=change: call(x, c, s, f), x, cos, sin)


def test_any_product_of_complex_numbers_is_a_rotation():
    def call(x, angles):
        pairs = torch.view_as_complex(x.reshape(B, S, H, -1, 2))
        return torch.view_as_real(pairs * table_of(angles).conj()), torch.view_as_real(pairs * pairs)

    assert checked(call, x, angles).steps.count("rotate") == 2
    call = lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(B, S, H, -1, 2)) * 2)  # noqa: E731
    assert "rotate" not in steps_of(call, x)


def test_fp64_has_no_kernel():
    assert "rotate" not in steps_of(stacked, x.double(), cos.double(), sin.double())
