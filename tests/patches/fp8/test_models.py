"""``optimize(..., precision="fp8")``: products of transformer blocks in E4M3."""

import copy

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.kernels.common.e4m3 import E4M3
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8 import product as fp8_product
from sdfastgn.patches.fp8 import products as fp8_products
from tests.patches.cases import WHERE
from tests.patches.fp8.blocks import CALLS, DIM, call, error, learn, made, state, twins

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("on_each_device", "without_gradients", "few_calls"),
]


def test_products_learn_then_run_in_e4m3(launches):
    fused, plain, stock = twins()
    for seed in range(CALLS):
        assert torch.equal(call(fused, seed), call(plain, seed))
        assert (state(fused).learning, state(fused).in_e4m3) == (
            4 * (seed + 1 < CALLS),
            4 * (seed + 1 == CALLS),
        )
    launches.clear()
    y = call(fused)
    written = [p["y_ptr"].dtype for name, _, p in launches if name in ("rows", "geglu")]
    assert written == [E4M3] * 8  # the input of each product, and its retry
    exact = call(copy.deepcopy(stock).float())
    assert error(call(plain), exact) < 0.002 < error(y, exact) < 0.05
    assert y.dtype is torch.float16
    found = state(fused)
    assert (found.products, found.inexact, found.adapted, found.beyond) == (4, (), 0, 0)
    assert 0.01 < found.error < 0.06
    assert f"FP8 in {type(fused).__name__}: 4 of 4 products" in str(sdfastgn.report(fused))


def test_not_finite_inputs_leave_the_model_in_its_dtype():
    fused, plain, _ = twins()
    for seed in range(CALLS):
        call(fused, seed, factor=float("inf"))
    assert state(fused).in_e4m3 == 0
    assert torch.equal(call(fused), call(plain))


def test_inexact_products_stay_in_the_models_dtype(monkeypatch):
    fused, _, _ = twins()
    # One channel of the input has huge values. Beside them, the other values are too small for E4M3.
    with torch.no_grad():
        fused.norm1.weight[3] = 1.5e4
        for layer in (fused.attn1.to_q, fused.attn1.to_k, fused.attn1.to_v):
            layer.weight[:, 3] = 0
    plain = sdfastgn.optimize(sdfastgn.restore(copy.deepcopy(fused)))
    learn(fused)
    found = state(fused)
    assert (found.in_e4m3, found.inexact) == (3, ("attn1",))
    assert "1 stay in the model's dtype, because of their error: attn1" in str(sdfastgn.report(fused))
    monkeypatch.setattr(fp8_product, "MOST_ERROR", 0.0)
    fused = sdfastgn.optimize(sdfastgn.restore(fused), precision="fp8")
    learn(fused)
    assert (state(fused).in_e4m3, len(state(fused).inexact)) == (0, 4)
    assert torch.equal(call(fused), call(plain))


def test_an_inexact_product_drops_no_graphs(monkeypatch):
    """No graph has read its copy in E4M3."""
    monkeypatch.setattr(fp8_product, "MOST_ERROR", 0.0)
    fused, _, _ = twins()
    learn(fused)
    layer = fused.ff.net[2]
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    call(fused)
    assert (state(fused).in_e4m3, len(state(fused).inexact)) == (0, 4)
    assert fp8.generation(fused) == 0


def test_products_that_are_never_called_take_no_memory():
    fused, _, _ = twins()
    fused.attn2.set_processor(type("Other", (type(fused.attn2.processor),), {})())
    assert state(fused).bytes == 0
    learn(fused)
    found = state(fused)
    assert (found.in_e4m3, found.learning, found.unused) == (3, 0, 1)
    assert found.bytes == (3 + 8 + 4) * DIM * DIM
    assert "1 were not called" in str(sdfastgn.report(fused))


def test_products_that_begin_late_learn_without_graphs():
    fused, _, _ = twins()
    hook = fused.attn1.to_v.register_forward_hook(lambda m, i, o: None)
    for _ in range(CALLS):
        assert fp8.reason_now(fused) == fp8_products.REASON
        call(fused)
    assert fp8.reason_now(fused) is None
    assert state(fused).unused == 1
    hook.remove()
    call(fused)
    assert (state(fused).learning, fp8.reason_now(fused)) == (1, fp8_products.REASON)
    learn(fused)
    assert state(fused).in_e4m3 == 4


def test_a_scripted_module_becomes_a_child_beside_products():
    block = sdfastgn.optimize(made(), precision="fp8")
    parent = nn.Module()
    parent.child = torch.jit.script(nn.Linear(2, 2))
    assert fp8.is_allowed(block)
    assert parent.child.weight.shape == (2, 2)


def hooked(block):
    block.attn1.to_v.register_forward_hook(lambda m, i, o: 2 * o)


def other_processor(block):
    block.attn2.set_processor(type("Doubled", (type(block.attn2.processor),), {})())


@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", [hooked, other_processor])
def test_what_the_fused_code_cannot_do_runs_in_the_models_dtype(change):
    fused, _, stock = twins()
    learn(fused)
    for block in (fused, stock):
        change(block)
    assert error(call(fused), call(stock)) < 0.05


@pytest.mark.parametrize(
    ("model", "precision", "text"),
    [
        (lambda: made(), "fp9", "must be None or"),
        (lambda: nn.Linear(4, 4), "fp9", "must be None or"),
        (lambda: made(dtype=torch.float32), "fp8", "its weights are torch.float32"),
        (lambda: nn.Sequential(nn.GroupNorm(2, 4)), "fp8", "no transformer blocks"),
        (
            lambda: made(num_attention_heads=1, attention_head_dim=DIM, activation_fn="gelu").attn1,
            "fp8",
            "no tr",
        ),
    ],
)
def test_what_cannot_run_in_fp8_is_refused_before_any_change(model, precision, text):
    model = model()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=text):
        sdfastgn.optimize(model, precision=precision)
    assert [type(module) for module in model.modules()] == kinds


def test_a_cpu_is_refused(monkeypatch):
    monkeypatch.undo()
    if WHERE["device"] == "cpu":
        with pytest.raises(ValueError, match="its weights are on cpu, and not on an NVIDIA GPU"):
            sdfastgn.optimize(made(), precision="fp8")
