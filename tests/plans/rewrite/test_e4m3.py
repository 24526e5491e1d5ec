"""Products of many rows in E4M3, with a scale for each row."""

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sdfastgn.plans.rewrite import e4m3
from sdfastgn.plans.rewrite.nodes import has
from sdfastgn.plans.rewrite.passes import rewrite
from sdfastgn.plans.run import steps
from sdfastgn.plans.run.aliases import VIEWS
from sdfastgn.plans.trace.tracer import trace
from tests.plans.rewrite.rewriting import name_of

pytestmark = pytest.mark.usefixtures("without_gradients")

BF16 = torch.bfloat16
# The relative error of a row's products of random numbers: E4M3 has three bits.
MEDIAN, MOST = 0.04, 0.06


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(e4m3, "FEWEST_ROWS", 6)
    monkeypatch.setattr(e4m3, "FEWEST_COLUMNS", 32)


drawn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))


def parameter(*shape):
    return drawn(shape).div(shape[-1] ** 0.5).to(BF16)


A, B, C = parameter(48, 32), parameter(32, 32), parameter(32, 48)
a, b = parameter(48), parameter(32)
x = drawn(2, 32, 32).to(BF16)


def rewritten(call, *inputs, in_e4m3=True):
    """(what runs, the names of its steps, its results) of the rewritten ``call``."""
    traced = trace(nn.Module(), call, *inputs)
    weights = [n for n in traced.graph.graph.nodes if n.op == "placeholder"] if in_e4m3 else []
    graph = rewrite(traced.graph.graph, weights)
    graph.lint()
    run = torch.fx.GraphModule(traced.graph, graph)
    free = (operator.getitem, *VIEWS)
    calls = [n for n in graph.nodes if n.op == "call_function" and n.target not in free]
    return graph, list(map(name_of, calls)), run(*traced.others, *inputs)


def steps_of(call, *inputs, products=1):
    """The steps of ``call``. Its rows are near those of eager: ``products`` of them follow each other."""
    _, found, results = rewritten(call, *inputs)
    wanted = call(*inputs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for y, truth in zip(results, wanted, strict=True):
        assert (y.shape, y.dtype) == (truth.shape, truth.dtype)
        errors = (y.double() - truth.double()).norm(dim=-1) / truth.double().norm(dim=-1)
        assert errors.quantile(0.5) < MEDIAN * products**0.5
        assert errors.quantile(0.95) < MOST * products**0.5
    return found


PRODUCT = ["quantize_rows", "quantize_weight", "linear_e4m3"]


@pytest.mark.parametrize("x", [x, x.flatten(0, 1), x[None]], ids=["3 axes", "2 axes", "4 axes"])
@pytest.mark.parametrize("bias", [None, a])
def test_a_product_of_many_rows(x, bias):
    assert steps_of(lambda x: F.linear(x, A, bias), x) == PRODUCT


def test_products_of_one_input_share_it():
    found = steps_of(lambda x: (F.linear(x, A, a), F.linear(x, B), F.linear(x, B, b)), x)
    assert found.count("quantize_rows") == 1
    assert found.count("quantize_weight") == 2
    assert found.count("linear_e4m3") == 3


@pytest.mark.parametrize("function", [F.silu, F.gelu, F.relu, lambda x: F.gelu(x, approximate="tanh")])
def test_an_activation_is_computed_with_the_rows(function):
    assert steps_of(lambda x: F.linear(function(x), A, a), x) == PRODUCT


def test_the_activation_between_two_products():
    found = steps_of(lambda x: F.linear(F.gelu(F.linear(x, A, a), approximate="tanh"), C, b), x, products=2)
    assert found == [*PRODUCT, *PRODUCT]


def test_a_concatenation_is_never_made():
    """As in blocks that have attention and a feed-forward network side by side."""

    def call(x, h):
        return F.linear(torch.cat([x, F.gelu(h, approximate="tanh")], -1), E)

    h = drawn(2, 32, 48).to(BF16)
    assert steps_of(call, x, h) == PRODUCT
    assert kinds_of_rows(call, x, h) == [("identity", "gelu_tanh")]


def kinds_of_rows(call, *inputs):
    """The activations of each step that writes rows, in order."""
    graph, *_ = rewritten(call, *inputs)
    found = [n.args for n in graph.nodes if has(n, steps.quantize_rows)]
    return [(args[1] if len(args) > 1 else "identity", *args[3:]) for args in found]


def test_what_others_read_is_computed_once():
    def call(x):
        y = F.silu(x)
        z = torch.cat([y, x], -1)
        return F.linear(y, A), y, F.linear(z, D), z

    steps_of(call, x)
    assert kinds_of_rows(call, x) == [("identity",), ("identity",)]


def test_a_part_that_others_read_is_computed_once():
    def call(x):
        y = F.silu(x)
        return F.linear(torch.cat([y, x], -1), D), y

    assert sorted(steps_of(call, x)) == sorted(["aten.silu", *PRODUCT])
    assert kinds_of_rows(call, x) == [("identity", "identity")]


def test_one_input_with_two_activations():
    def call(x):
        return F.linear(F.silu(x), A), F.linear(F.relu(x), A), F.linear(x, A)

    steps_of(call, x)
    assert kinds_of_rows(call, x) == [("silu",), ("relu",), ("identity",)]


def modulated(x, gate, scale, shift):
    """A gated sum and its norm, as blocks with adaptive norms compute them."""
    total = x + gate[:, None] * x.flip(1)
    return total, F.layer_norm(total, (32,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def test_an_adaptive_norm_writes_e4m3():
    def call(x, *modulation):
        total, y = modulated(x, *modulation)
        return F.linear(y, A, a), F.linear(y, B), total

    modulation = [drawn(2, 32).to(BF16) for _ in range(3)]
    found = steps_of(call, x, *modulation)
    assert found.count("ada_norm_in_e4m3") == 1
    assert found.count("linear_e4m3") == 2
    assert "quantize_rows" not in found
    assert "ada_norm" not in found


def test_an_adaptive_norm_that_others_read_too():
    def call(x, *modulation):
        total, y = modulated(x, *modulation)
        return F.linear(y, A, a), y + 1, total

    modulation = [drawn(2, 32).to(BF16) for _ in range(3)]
    found = steps_of(call, x, *modulation)
    assert found.count("ada_norm") == found.count("quantize_rows") == 1
    assert "ada_norm_in_e4m3" not in found


def test_a_product_of_the_sum_before_a_norm():
    def call(x, *modulation):
        total, y = modulated(x, *modulation)
        return F.linear(total, A, a), y

    found = steps_of(call, x, *[drawn(2, 32).to(BF16) for _ in range(3)])
    assert found.count("ada_norm") == found.count("quantize_rows") == 1


@pytest.mark.parametrize("function", [F.silu, lambda x: F.gelu(x, approximate="tanh")])
@pytest.mark.parametrize("order", [1, -1])
def test_a_gated_activation_is_computed_with_the_rows(function, order):
    """As SwiGLU: two products, or two halves of one."""

    def products(x):
        gate, value = (function(F.linear(x, A)), F.linear(x, A, a))[::order]
        return F.linear(gate * value, C, b)

    assert steps_of(products, x, products=3).count("quantize_rows") == 2
    assert kinds_of_rows(products, x)[1][1:] == ("identity", True)
    halves = drawn(2, 32, 96).to(BF16)
    assert steps_of(lambda x: F.linear(function(x[..., :48]) * x[..., 48:], C), halves) == PRODUCT


def test_other_products_of_activations_are_computed_before():
    def broadcast(x):
        return F.linear(F.silu(x[:, :1]) * x, A)

    def read_twice(x):
        gate = F.silu(x)
        return F.linear(gate * x.flip(-1), A), gate

    def itself(x):
        gate = F.silu(x)
        return F.linear(gate * gate, A)

    for call in (broadcast, read_twice, itself):
        assert "aten.mul" in steps_of(call, x)
        assert kinds_of_rows(call, x) == [("identity",)]


def test_other_concatenations_are_made():
    def rows(x):
        return F.linear(torch.cat([x, x * 2], 1), A)

    def three(x):
        return F.linear(torch.cat([x[..., :16], x, x[..., 16:]], -1), D)

    for call in (rows, three):
        assert "cat" in steps_of(call, x)
        assert kinds_of_rows(call, x) == [("identity",)]


D, E = parameter(32, 64), parameter(32, 80)
COLUMNS_16, ROWS_16, ROWS_40 = parameter(48, 16), parameter(16, 32), parameter(40, 32)
IN_FP16, IN_FP32 = A.half(), A.float()


@pytest.mark.parametrize(
    ("call", "inputs"),
    [
        pytest.param(lambda x: F.linear(x, A), (x[:1, :5],), id="few rows"),
        pytest.param(lambda x: F.linear(x, ROWS_16), (x,), id="few columns"),
        pytest.param(lambda x: F.linear(x, COLUMNS_16), (x[..., :16],), id="short rows"),
        pytest.param(lambda x: F.linear(x, ROWS_40), (x,), id="no multiple of 16"),
        pytest.param(lambda x: F.linear(x, IN_FP16), (x.half(),), id="fp16"),
        pytest.param(lambda x: F.linear(x, IN_FP32), (x.float(),), id="fp32"),
        pytest.param(lambda x: F.linear(x, A * 2), (x,), id="no parameter"),
        pytest.param(lambda x: x @ x.mT, (x,), id="no linear layer"),
    ],
)
def test_other_products_stay(call, inputs):
    assert "linear_e4m3" not in rewritten(call, *inputs)[1]


def test_rows_that_are_too_long_for_a_program_stay():
    for size, fits in ((16384, True), (16400, False)):
        long, weight = drawn(1, 6, size).to(BF16), parameter(32, size)
        assert ("linear_e4m3" in rewritten(functools.partial(F.linear, weight=weight), long)[1]) == fits


def test_without_leave_nothing_changes():
    assert rewritten(lambda x: F.linear(x, A, a), x, in_e4m3=False)[1] == ["linear"]


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_an_outlier_costs_only_its_own_row(size):
    """With one scale for all rows, most values of the other rows would be rounded to 0."""
    rows = drawn(1, 64, 32).to(BF16)
    rows[0, 5] *= size
    steps_of(lambda x: F.linear(x, A, a), rows)


def test_a_large_row_of_a_weight_costs_only_its_own_column():
    """As a strong LoRA makes it."""
    strong = A.clone()
    strong[7] *= 1e4
    rows = drawn(1, 64, 32).to(BF16)
    *_, (y,) = rewritten(lambda x: F.linear(x, strong), rows)
    truth = F.linear(rows.double(), strong.double())
    errors = (y.double() - truth).norm(dim=(0, 1)) / truth.norm(dim=(0, 1))
    assert errors.max() < MOST


def test_a_row_with_nan_is_nan_and_touches_no_other():
    rows = drawn(1, 8, 32).to(BF16)
    spoiled = rows.clone()
    spoiled[0, 3, 1] = float("nan")
    *_, (y,) = rewritten(lambda x: F.linear(x, A, a), spoiled)
    *_, (plain,) = rewritten(lambda x: F.linear(x, A, a), rows)
    assert y[0, 3].isnan().all()
    others = [i for i in range(8) if i != 3]
    assert torch.equal(y[0, others], plain[0, others])
