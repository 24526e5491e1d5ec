"""Rows that views repeat: products of each row once, norms of sums with them, and near misses."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import checked, steps_of

D = 8
W, B, W2 = torch.randn(6, D), torch.randn(6), torch.randn(D, D)
x = torch.randn(2, 3, 5, D)
one = torch.randn(2, 1, D)


def sizes_of_products(plan):
    return [n.meta["shape"] for n in plan.graph.nodes if n.target is steps.linear]


# ---- attention to one key


def heads(t, S):
    return t.view(2, S, 2, D // 2).transpose(1, 2)


def test_attention_to_a_single_key_is_its_value():
    def call(q, k):
        y = F.scaled_dot_product_attention(heads(q @ W2.T, 15), heads(k @ W2, 1), heads(k @ W2.T, 1))
        return y.transpose(1, 2).flatten(2) + q

    plan = checked(call, x.flatten(1, 2), one)
    assert plan.steps == ["linear", "aten.add"]
    assert sizes_of_products(plan) == [(2, 1, D)]


@pytest.mark.parametrize(("keys", "mask"), [(2, None), (1, torch.randn(15, 1))], ids=["two keys", "a mask"])
def test_other_attention_stays(keys, mask):
    k = torch.randn(2, keys, D)
    found = steps_of(
        lambda q, k: F.scaled_dot_product_attention(heads(q, 15), heads(k, keys), heads(k, keys), mask),
        x.flatten(1, 2),
        k,
    )
    assert "attention" in found


# ---- products


@pytest.mark.parametrize(
    ("repeat", "rows"),
    [
        (lambda t: t.expand(2, 5, D), 2),
        (lambda t: t[:1].expand(2, 5, D), 1),
        (lambda t: t[:, None].expand(2, 3, 5, D).reshape(6, 5, D), 2),
        (lambda t: t[:, None].expand(2, 3, 5, D).permute(2, 1, 0, 3).reshape(15, 2, D), 2),
        (lambda t: t.view(2, 1, 2, 4).expand(2, 5, 2, 4).flatten(2), 2),
    ],
)
@pytest.mark.parametrize("bias", [None, B])
def test_a_product_of_repeated_rows(repeat, rows, bias):
    plan = checked(lambda t: F.linear(repeat(t), W, bias) * 2, one)
    assert [shape.numel() for shape in map(torch.Size, sizes_of_products(plan))] == [rows * 6]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: F.linear(t.expand(2, 5, D).mT, torch.ones(6, 5)),
        lambda t: F.linear(t[..., :1].expand(2, 1, D), W),
        lambda t: F.linear(t.expand(2, 5, D) * 2, W),
        lambda t: F.linear(t.reshape(2, D, 1).expand(2, D, D), W),
    ],
    ids=["another axis", "elements of a row", "computed", "elements of a column"],
)
def test_other_products_stay(call):
    checked(call, one)


# ---- norms of sums


def normed(total):
    return F.layer_norm(total, (D,), W2[0], W2[1])


@pytest.mark.parametrize(
    ("repeat", "number", "period"),
    [
        (lambda t: t[:, None].expand(2, 3, 5, D), 2, 15),
        (lambda t: t[:1, None].expand(2, 3, 5, D), 1, 30),
        (lambda t: t.new_ones(3, D).cumsum(0).sin()[None, :, None].expand(2, 3, 5, D), 3, 5),
        (lambda t: t.view(2, 1, 1, 2, 4).expand(2, 3, 5, 2, 4).flatten(3), 2, 15),
    ],
)
@pytest.mark.parametrize("flip", [False, True])
def test_a_norm_of_a_sum_with_repeated_rows(repeat, number, period, flip):
    def call(x, t):
        x = x * 2
        total = repeat(t) + x if flip else x + repeat(t)
        return normed(total), total

    plan = checked(call, x, one)
    (step,) = [n for n in plan.graph.nodes if n.target is steps.grouped_layer_norm]
    assert (step.args[1], step.args[2].meta["shape"], step.args[3]) == (None, (number, D), period)


def test_a_norm_of_a_sum_of_three():
    def call(x, y, t):
        total = (x + y) + t[:, None].expand(2, 3, 5, D)
        return total + F.linear(normed(total), W2, W2[1])

    found = steps_of(call, x, x + 1, one)
    assert found == ["grouped_layer_norm", "add_linear_"]


def test_rows_that_are_repeated_around_others_are_added_apart():
    def call(x, t):
        return normed(x + t.view(2, 1, 1, D).expand(2, 3, 5, D).transpose(0, 1).reshape(2, 3, 5, D))

    def other(x, t):
        rows = torch.cat([t, t + 1, t + 2], 1)[:, :, None].expand(2, 3, 5, D)  # periods of 5, all different
        return normed(x + rows)

    checked(call, x, one)
    plan = checked(other, x, one)
    (step,) = [n for n in plan.graph.nodes if n.target is steps.grouped_layer_norm]
    assert step.args[2].meta["shape"] == (6, D)

    def split(x, t):
        rows = torch.stack([t[:, 0], t[:, 0] + 1], 1)[:, None].expand(2, 3, 2, D)
        return normed(x[:, :, :2] + rows)

    assert "grouped_layer_norm" not in steps_of(split, x, one)
