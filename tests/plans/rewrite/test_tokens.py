"""Sums before layer norms, gated activations, what products take in, and near misses."""

import pytest
import torch
import torch.nn.functional as F

from sdfastgn.plans.run import steps
from tests.plans.rewrite.rewriting import Rewritten, checked, steps_of

D = 8
x, y = torch.randn(2, 5, D), torch.randn(2, 5, D)
W, W2, B, B2 = torch.randn(D, D), torch.randn(D, D), torch.randn(D), torch.randn(D)
HALF = torch.bfloat16


def norm(t, w=W[0], b=B):
    return F.layer_norm(t, (D,), w, b)


# ---- sums before layer norms


def test_a_sum_goes_into_the_norm():
    assert steps_of(lambda x, y: norm(x + y) * 2, x, y) == ["add_layer_norm", "aten.mul"]


def test_the_sum_is_a_result_too():
    def call(x, y):
        total = x + y
        return norm(total), total, total * 2

    assert steps_of(call, x, y) == ["add_layer_norm", "aten.mul"]


def test_two_norms_of_one_sum():
    def call(x, y):
        return norm(x + y) * norm(x + y, None, None)

    assert steps_of(call, x, y) == ["add_layer_norm", "ada_norm"]


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda x, y: norm(torch.add(x, y, alpha=2)), ["aten.add", "layer_norm"]),
        (lambda x, y: norm(x + x), ["aten.add", "layer_norm"]),
        (lambda x, y: norm(x + y[:, :1]), ["aten.add", "layer_norm"]),
        (lambda x, y: norm(x + 1), ["aten.add", "layer_norm"]),
        (lambda x, y: norm(x - y), ["aten.sub", "layer_norm"]),
        (lambda x, y: norm(x + y.to(HALF)), ["cast", "aten.add", "layer_norm"]),
        (
            lambda x, y: F.layer_norm(x.double() + y.double(), (D,)),
            ["cast", "cast", "aten.add", "layer_norm"],
        ),
        (lambda x, y: norm((x + y) * 2), ["aten.add", "aten.mul", "layer_norm"]),
        (lambda x, y: F.layer_norm((x + y).mT, (5,)), ["aten.add", "layer_norm"]),
    ],
)
def test_what_is_no_sum_before_a_norm(call, steps):
    assert steps_of(call, x, y) == steps


def test_a_weight_that_depends_on_the_sum():
    def call(x, y):
        total = x + y
        return norm(total, total[0, 0])

    assert steps_of(call, x, y) == ["aten.add", "layer_norm"]


# ---- sums in place


def block(x, y, *, also=None, bias=B2, flip=False):
    """A branch of a transformer: x + y, its norm, and the sum with a product of the norm."""
    total = x + y
    branch = F.linear(norm(total), W2, bias)
    result = branch + total if flip else total + branch
    return result if also is None else (result, also(total, branch))


@pytest.mark.parametrize("more", [{}, {"bias": None}, {"flip": True}])
def test_a_product_is_added_in_place(more):
    assert steps_of(lambda x, y: block(x, y, **more), x, y) == ["add_layer_norm", "add_linear_"]
    halves = x.to(HALF), y.to(HALF)

    def call(x, y):
        total = x + y
        return total + F.linear(norm(total, None, None), x[0, :1].expand(D, D))

    assert steps_of(call, *halves) == ["add_layer_norm", "add_linear_"]


@pytest.mark.parametrize(
    "also",
    [
        lambda total, branch: total,
        lambda total, branch: total * 2,
        lambda total, branch: total.mT,
        lambda total, branch: total[:, 1:] * 2,
        lambda total, branch: branch,
        lambda total, branch: branch.exp(),
        lambda total, branch: norm(total, None, None),
    ],
)
def test_a_sum_or_product_that_is_read_elsewhere_stays(also):
    assert "add_linear_" not in steps_of(lambda x, y: block(x, y, also=also), x, y)


def test_a_sum_without_norm_is_not_written_over():
    def call(x, y):
        total = x + y
        return total + F.linear(x, W2, B2)

    assert steps_of(call, x, y) == ["aten.add", "linear", "aten.add"]


def test_an_argument_is_not_written_over():
    assert steps_of(lambda x: x + F.linear(norm(x), W2, B2), x) == ["layer_norm", "linear", "aten.add"]


def test_sums_of_several_blocks():
    def call(x, y):
        for _ in range(3):
            total = x + y
            x = total + F.linear(norm(total), W, B)
            y = F.linear(norm(x), W2, B2)
        return x + y

    own = ["linear", "add_layer_norm", "add_linear_", "layer_norm"]
    assert steps_of(call, x, y) == ["add_layer_norm", *own, *own, *own[:3]]


# ---- gates


def fp32_silu(x):
    """SiLU in fp32, in the dtype of x."""
    return F.silu(x.float()).to(x.dtype)


GATED = {
    "values first": lambda x: x[..., :4] * F.gelu(x[..., 4:]),
    "gates first": lambda x: F.silu(x[..., :4]) * x[..., 4:],
    "chunks": lambda x: F.gelu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0],
    "a split": lambda x: torch.mul(*(f(t) for f, t in zip((F.silu, abs), x.split(4, -1), strict=True))),
    "an axis of two": lambda x: F.silu(x.view(2, 5, 2, 4)[:, :, 0]) * x.view(2, 5, 2, 4)[:, :, 1],
    "GELU by tanh": lambda x: x[..., :4] * F.gelu(x[..., 4:], approximate="tanh"),
    "parts": lambda x: x[..., :3] * F.relu(x[..., 4:7]),
    "x by sigmoid": lambda x: x[..., :4] * (x[..., 4:] * torch.sigmoid(x[..., 4:])),
    "samples": lambda x: x[:1] * F.mish(x[1:]),
    "the value itself": lambda x: x * F.silu(x),
    "two products": lambda x: F.silu(F.linear(x, W.to(x), B.to(x))) * F.linear(x, W2.to(x)),
    "images": lambda x: (
        x[None].transpose(1, 3).chunk(2, 1)[0] * F.silu(x[None].transpose(1, 3).chunk(2, 1)[1])
    ),
    "in fp32": lambda x: fp32_silu(x[..., :4]) * x[..., 4:],
    "one of two activations": lambda x: F.silu(x[..., :4]) * F.gelu(x[..., 4:]),
}


@pytest.mark.parametrize("name", GATED)
def test_a_gated_activation(name):
    for each in (x, x.to(HALF)):
        steps = steps_of(GATED[name], each)
        assert steps.count("gated") == 1
        left = {"one of two activations": ["aten.silu"], "a split": ["aten.abs"]}.get(name, [])
        assert [step for step in steps if step not in ("gated", "linear", "linears", "cast")] == left


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[:, :, :4] * F.silu(x[:, :, 4:5]),
        lambda x: x[:, :1] * F.silu(x),
        lambda x: x[..., :4] * F.silu(x[..., 4:].double()),
        lambda x: x[..., :4] * F.silu(x[..., 4:]).to(HALF),
        lambda x: x[..., :4].double() * F.silu(x[..., 4:]),
        lambda x: x[..., :4] * F.silu(x[..., 4:]).to(HALF).float(),
        lambda x: x[..., :4] + F.silu(x[..., 4:]),
        lambda x: x[..., :4] * torch.sigmoid(x[..., 4:]),
        lambda x: F.silu(x[..., :4]) * 2,
        lambda x: (x[..., :4] * F.silu(x[..., 4:]), F.silu(x[..., 4:])),
        lambda x: (x[..., :4] * F.silu(x[..., 4:]), F.silu(x[..., 4:]) * 3),
        lambda x: F.silu(x) * F.silu(x),
        lambda x: x.double() * F.silu(x.double()),
        lambda x: x[0, 0, 0] * F.silu(x[1, 0, 0]),
    ],
)
def test_other_products_with_activations_stay(call):
    assert "gated" not in steps_of(call, x)


def test_an_activation_in_fp32_that_is_read_elsewhere_stays():
    def call(x):
        wide = F.silu(x[..., 4:].float())
        return x[..., :4] * wide.to(x.dtype), wide

    assert "gated" not in steps_of(call, x.to(HALF))


def test_a_gated_product_before_a_sum():
    """It is no gated sum of tokens, where the activation would be a gate."""
    for silu in (F.silu, fp32_silu):
        for each in (x, x.to(HALF)):
            steps = steps_of(
                lambda x, y, silu=silu: x + silu(y) * F.linear(x, W.to(x.dtype)), each, y.to(each)
            )
            assert steps.count("gated") == 1


# ---- few rows


few = torch.randn(2, D)


@pytest.mark.parametrize("act", [F.silu, F.gelu, F.relu])
def test_few_rows(act):
    assert steps_of(lambda t: F.linear(act(t), W, B), few) == ["act_linear"]
    assert steps_of(lambda t: F.linear(act(t), W), few) == ["act_linear"]


def test_another_row_is_a_second_bias():
    plan = checked(lambda t: B2 + F.linear(F.silu(t), W, B), few)
    assert plan.steps == ["act_linear"]
    assert plan.only(steps.act_linear).args[4] is not None


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        (lambda t: F.linear(t, W, B), ["linear"]),
        (lambda t: F.linear(F.silu(t.repeat(9, 1)), W, B), ["aten.silu", "linear"]),
        (lambda t: F.linear(F.silu(t.unsqueeze(1)), W, B), None),
        (lambda t: F.linear(F.silu(t), W, B) + t, ["act_linear", "aten.add"]),
        (lambda t: F.linear(F.silu(t), W, B) + B2 + B2, ["act_linear", "aten.add"]),
        (lambda t: torch.add(F.linear(F.silu(t), W, B), B2, alpha=2), ["act_linear", "aten.add"]),
        (lambda t: F.linear(F.silu(t), W, B) + B2.double(), ["cast", "act_linear", "aten.add"]),
        (lambda t: F.linear(F.silu(t), W, B) + B2[:1], ["act_linear", "aten.add"]),
    ],
)
def test_other_rows(call, steps):
    found = steps_of(call, few)
    assert sorted(found) == sorted(steps) if steps else "act_linear" not in found


def test_rows_that_are_read_elsewhere():
    def call(t):
        y = F.linear(F.silu(t), W, B)
        return y + B2, y * 2

    assert sorted(steps_of(call, few)) == ["act_linear", "aten.add", "aten.mul"]


# ---- GELU of products


def many_rows(x):
    return x.to(HALF).expand(4, *x.shape).reshape(-1, 5, D)


def tanh_gelu(x, w=W2, b=B2):
    return F.gelu(F.linear(x, w.to(x.dtype), None if b is None else b.to(x.dtype)), approximate="tanh")


def test_a_product_computes_gelu():
    assert steps_of(tanh_gelu, many_rows(x)) == ["cast", "cast", "linear_gelu"]


@pytest.mark.parametrize(
    ("call", "step"),
    [
        (lambda x: F.gelu(F.linear(x, W2.to(HALF), B2.to(HALF))), "aten.gelu"),
        (lambda x: tanh_gelu(x, b=None), "aten.gelu"),
        (lambda x: tanh_gelu(x.float()), "aten.gelu"),
        (lambda x: tanh_gelu(x[:2]), "aten.gelu"),
        (lambda x: F.gelu(F.linear(x, W2.to(HALF), B2.to(HALF)) * 2, approximate="tanh"), "aten.gelu"),
        (lambda x: F.silu(F.linear(x, W2.to(HALF), B2.to(HALF))), "aten.silu"),
    ],
)
def test_other_activations_and_products(call, step):
    steps = steps_of(call, many_rows(x))
    assert "linear_gelu" not in steps
    assert step in steps


def test_a_product_that_is_read_elsewhere_computes_no_gelu():
    def call(x):
        y = F.linear(x, W2.to(HALF), B2.to(HALF))
        return F.gelu(y, approximate="tanh") + y

    assert "linear_gelu" not in steps_of(call, many_rows(x))


# ---- products of concatenations

tokens = torch.randn(2, 40, 16)  # more rows than ``act_linear`` takes
WIDE, WIDE_BIAS = torch.randn(8, 24) / 5, torch.randn(8)


def joined(x, dtype=torch.float32, w=WIDE, b=WIDE_BIAS):
    """A product of x and of half of its columns, as after attention and a feed-forward in parallel."""
    parts = torch.cat([torch.tanh(x.to(dtype)), x[..., :8].to(dtype)], -1)
    return F.linear(parts, w.to(dtype), None if b is None else b.to(dtype))


def products(plan):
    """(columns of the part, columns of the weight in use) of each product, in order."""
    parts = [
        n.args[-3:-1] if n.target is steps.linear else n.args[1:] for n in plan.calls if "linear" in n.name
    ]
    return [(part.meta["shape"][-1], weight.args[2:]) for part, weight in parts]


@pytest.mark.parametrize("bias", [WIDE_BIAS, None], ids=["bias", "no-bias"])
def test_a_product_of_a_cat_is_a_sum_of_products(bias):
    plan = checked(lambda x: joined(x, b=bias), tokens)
    assert plan.steps == ["aten.tanh", "linear", "add_linear_"]
    assert products(plan) == [(8, (16, 8)), (16, (0, 16))]
    three = steps_of(
        lambda x: F.linear(torch.cat([x, x[..., 4:8], x], -1), WIDE.repeat(1, 2)[:4, :36]), tokens
    )
    assert three == ["linear", "add_linear_", "add_linear_"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: joined(x).exp() * torch.cat([torch.tanh(x), x[..., :8]], -1)[..., :8],
        lambda x: F.linear(torch.cat([x, x * 2], 1), torch.ones(8, 16)),
        lambda x: joined(x[:, :2]),
        lambda x: joined(x[:, :0]),
        lambda x: joined(x, torch.float16),
        lambda x: joined(x, torch.float64),
        lambda x: joined(x, w=WIDE.repeat(3, 1), b=None),
        lambda x: F.linear(torch.cat([x, x[..., :2]], -1), torch.ones(1, 18)),
        lambda x: F.linear(torch.cat([x[..., :2], x], -1).to(HALF), torch.ones(8, 18, dtype=HALF)),
    ],
)
def test_other_products_stay_whole(call):
    assert "add_linear_" not in steps_of(call, tokens)


@pytest.mark.parametrize("cut", [64, 256])
def test_a_block_with_a_sum_of_products_is_as_exact_as_stock(cut):
    """The sum in bf16 is rounded twice. Stock rounds the product, then times the gate, then the result."""
    torch.manual_seed(0)
    x, w, b, gate = (torch.randn(s).to(HALF) for s in ((2, 64, 320), (32, 320), (32,), (2, 1, 32)))

    def block(x):
        weight, bias, factor = (w / 16).to(x.dtype), (b / 16).to(x.dtype), gate.to(x.dtype)
        y = F.linear(torch.cat([torch.tanh(x[..., :cut]), x[..., cut:]], -1), weight, bias)
        return y, x[..., :32] + factor * y

    plan = Rewritten(block, x)
    assert "add_linear_" in plan.steps
    stock, exact = block(x), block(x.double())
    own, own_sum = (torch.dist(y, e) for y, e in zip(plan(x), exact, strict=True))
    stocks, stocks_sum = (torch.dist(y, e) for y, e in zip(stock, exact, strict=True))
    assert own <= 2**0.5 * stocks  # the first rounding is of the smaller part
    assert own_sum <= stocks_sum
