"""Gated sums, norms of tokens with modulations, RMS norms in all spellings, and near misses."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, steps_of

B, S, D = 2, 5, 8
HALF, WIDE = torch.bfloat16, torch.float32
x, y, z = (torch.randn(B, S, D) for _ in range(3))
e = torch.randn(B, 3 * D)
W, V = torch.randn(D), torch.randn(D)
M = torch.randn(D, D)


def layer(t, w=None, b=None):
    return F.layer_norm(t, (D,), w, b, 1e-6)


def rms(t, w=None, eps=1e-6):
    return F.rms_norm(t, (D,), w, eps)


def by_hand(t, w=None, eps=1e-6):
    """In fp32, and then in the dtype of t and of the weight."""
    n = t * torch.rsqrt(t.to(WIDE).pow(2).mean(-1, keepdim=True) + eps)
    return n.to(t.dtype) if w is None else n.to(w.dtype) * w


def cut(e):
    return (part[:, None] for part in e.chunk(3, -1))


def block(x, y, e, norm=layer):
    """A sum, its norm, and the modulation of the norm."""
    gate, factor, offset = cut(e)
    total = x + gate * y
    return total, norm(total) * (1 + factor) + offset


# ---- what is one step


@pytest.mark.parametrize("norm", [layer, lambda t: layer(t, W, V), rms, lambda t: rms(t, W), by_hand])
def test_a_gated_sum_its_norm_and_modulation(norm):
    assert steps_of(lambda x, y, e: block(x, y, e, norm), x, y, e) == ["ada_norm"]


def test_results_that_nobody_reads_are_not_computed():
    plan = checked(lambda x, y, e: block(x, y, e)[1] * 2, x, y, e)
    assert plan.steps == ["ada_norm", "aten.mul"]
    assert plan.only(steps.ada_norm).args[-1] is False
    plan = checked(lambda x, y, e: block(x, y, e)[0] * 2, x, y, e)
    assert plan.only(steps.ada_norm).args[4] is None


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y, e: layer(x) * e[:, None, :D],
        lambda x, y, e: e[:, None, :D] * layer(x),
        lambda x, y, e: e[:, None, :D] + layer(x),
        lambda x, y, e: rms(x),
        lambda x, y, e: by_hand(x, W),
        lambda x, y, e: by_hand(x + y, W),
        lambda x, y, e: rms(x) * W,
        lambda x, y, e: rms(x, W) * y,
        lambda x, y, e: layer(x) * W * (e[:, None, :D] + 1) + y,
        lambda x, y, e: layer(x + y * V),
        lambda x, y, e: layer(x + rms(y, W), W, V),
        lambda x, y, e: x + y * e[:, None, :D],
        lambda x, y, e: e[:, None, :D] * rms(y, W) + x,
        lambda x, y, e: by_hand(y) * W + x,
        lambda x, y, e: x / torch.sqrt(x.square().mean(-1, keepdim=True) + 0.1),
    ],
)
def test_parts_may_be_missing(call):
    assert steps_of(call, x, y, e) == ["ada_norm"]


def test_tanh_and_one_plus_are_computed_by_the_step():
    def call(x, y, e):
        gate, factor, _ = cut(e)
        total = x + gate.tanh() * by_hand(y, W)
        return total, by_hand(total, V) * (1 + factor)

    plan = checked(call, x, y, e)
    assert plan.steps == ["ada_norm"]
    assert plan.only(steps.ada_norm).args[7:] == (True, True, True)


def test_two_norms_of_one_sum():
    def call(x, y, e):
        gate, factor, offset = cut(e)
        total = x + gate * y
        return layer(total) * factor, layer(total) * offset, total

    assert steps_of(call, x, y, e) == ["ada_norm", "ada_norm"]


def test_blocks_one_after_the_other():
    def call(x, y, e):
        total, a = block(x, y, e)
        total, b = block(total, a * 2, e, by_hand)
        return block(total, b * 2, e)

    assert steps_of(call, x, y, e) == ["ada_norm", "aten.mul"] * 2 + ["ada_norm"]


@pytest.mark.parametrize("gate", [torch.randn(1, 1, D), torch.randn(B, S, D), torch.randn(1, S, D), W])
def test_modulations_of_any_size(gate):
    def call(x, y, gate):
        total = x + y * gate
        return total, layer(total) * gate + gate

    assert steps_of(call, x, y, gate) == ["ada_norm"]


def test_casts_that_round_to_no_fewer_bits_than_the_result():
    def call(x, y, e):
        gate, factor, offset = cut(e.to(WIDE))
        total = (x.to(WIDE) + y * gate).type_as(x)
        return total, (layer(total.to(WIDE)) * (1 + factor) + offset).type_as(x)

    *halves, w = (t.to(HALF) for t in (x, y, e, W))
    assert steps_of(call, *halves) == ["cast", "ada_norm"]
    assert steps_of(lambda x, y, e: block(x, y, e, lambda t: by_hand(t, w)), *halves) == ["ada_norm"]


@pytest.mark.parametrize(
    "part", [lambda t: t[:, 3:], lambda t: t[:, :5], lambda t: t[..., :D].narrow(1, 0, 5)]
)
def test_the_bias_of_a_product_of_a_part_of_each_sample(part):
    """PyTorch would add it in a second pass."""
    tokens = torch.randn(B, 8, D)

    def call(x, e, tokens):
        gate, factor, _ = cut(e)
        total = x + gate * F.linear(part(tokens), M, V)
        return total, layer(total) * factor

    plan = checked(call, x, e, tokens)
    assert plan.steps == ["linear", "ada_norm"]
    assert plan.only(steps.linear).args[2] is None
    assert plan.only(steps.ada_norm).args[3][:2] == ("none", None)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, e, t: x + e[:, None, :D] * F.linear(t[:, :5] * 2, M, V),
        lambda x, e, t: x[:1] + e[:1, None, :D] * F.linear(t[:1, :5], M, V),
        lambda x, e, t: x + e[:, None, :D] * rms(F.linear(t[:, :5], M, V)),
        lambda x, e, t: (x + e[:, None, :D] * (product := F.linear(t[:, :5], M, V)), product),
    ],
)
def test_biases_that_products_add(call):
    plan = checked(call, x, e, torch.randn(B, 8, D))
    assert plan.only(steps.linear).args[2] is not None


# ---- what is none


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x, y, e: layer(x), ["layer_norm"]),
        (lambda x, y, e: layer(x + y), ["add_layer_norm"]),
        (lambda x, y, e: x + y, ["aten.add"]),
        (lambda x, y, e: x + 2 * y, ["aten.mul", "aten.add"]),
        (lambda x, y, e: x + y * e[:, :1, None], ["aten.mul", "aten.add"]),
        (lambda x, y, e: torch.add(x, y * W, alpha=2), ["aten.mul", "aten.add"]),
        (lambda x, y, e: x - y * W, ["aten.mul", "aten.sub"]),
        (lambda x, y, e: x + y * F.silu(x), ["gated", "aten.add"]),
        (lambda x, y, e: layer(x) * e[0, 0], ["layer_norm", "aten.mul"]),
        (lambda x, y, e: layer(x) * 3 + W, ["layer_norm", "aten.mul", "aten.add"]),
        (lambda x, y, e: layer(x) - W, ["layer_norm", "aten.sub"]),
        (lambda x, y, e: (layer(x) + W) * V, ["ada_norm", "aten.mul"]),
        (lambda x, y, e: layer(x.mT.contiguous().mT[0]) * W, ["layer_norm", "aten.mul"]),
        (lambda x, y, e: layer(x)[:, :1] * y, ["layer_norm", "aten.mul"]),
        (lambda x, y, e: F.layer_norm(x, (S, D)) * W, ["aten.layer_norm", "aten.mul"]),
        (lambda x, y, e: F.rms_norm(x, (S, D), None, 1e-6), ["aten.rms_norm"]),
        (
            lambda x, y, e: x * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6),
            ["aten.mul", "aten.mean", "aten.add", "aten.rsqrt", "aten.mul"],
        ),
        (
            lambda x, y, e: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6),
            ["aten.mul", "aten.mean", "aten.add", "aten.rsqrt", "aten.mul"],
        ),
        (lambda x, y, e: layer(x).to(HALF) * e[:, None, :D], ["layer_norm", "cast", "aten.mul"]),
        (lambda x, y, e: layer(x).to(HALF).to(WIDE) * W, ["layer_norm", "cast", "cast", "aten.mul"]),
        (lambda x, y, e: (x + y * W).to(HALF).to(WIDE), ["ada_norm", "cast", "cast"]),
        (lambda x, y, e: layer((x + y * W).to(HALF).to(WIDE)) * V, ["ada_norm", "cast", "cast", "ada_norm"]),
        (lambda x, y, e: layer((x + y * W) * 2) * V, ["ada_norm", "aten.mul", "ada_norm"]),
    ],
)
def test_near_misses(call, expected):
    assert steps_of(call, x, y, e) == expected


def test_sixteen_bits_that_are_not_those_of_the_result():
    """A result in fp32 of tokens in bf16, and one in fp16 of values that were rounded to bf16."""
    half = x.to(HALF)
    assert "ada_norm" not in steps_of(lambda x: rms(x.to(WIDE), W) * 2, half)[-1:]
    call = lambda x: rms(x.to(torch.float16).to(HALF)).to(torch.float16) + W.to(torch.float16)  # noqa: E731
    assert steps_of(call, x)[:2] == ["cast", "cast"]


def test_a_modulation_that_depends_on_the_sum():
    def call(x, y, e):
        gate, *_ = cut(e)
        total = x + gate * y
        return total, layer(total) * total[:, :1]

    assert steps_of(call, x, y, e) == ["ada_norm", "ada_norm"]


def test_a_later_norm_with_a_modulation_from_an_earlier_norm():
    def call(x, y, e):
        gate, factor, _ = cut(e)
        total = x + gate * y
        first = layer(total) * factor
        return first, layer(total) * first.mean(1, keepdim=True)

    assert steps_of(call, x, y, e) == ["ada_norm", "aten.mean", "ada_norm"]


def test_fp64_has_no_kernel():
    doubles = [t.double() for t in (x, y, e)]
    assert "ada_norm" not in steps_of(block, *doubles)


def test_long_rows_have_no_kernel():
    long = torch.randn(1, 1, 16400)
    assert steps_of(lambda t: F.layer_norm(t, (16400,)) * t, long) == ["layer_norm", "aten.mul"]


def test_tokens_without_elements():
    empty = torch.empty(2, 0, D)
    assert "ada_norm" not in steps_of(block, empty, empty, e)
