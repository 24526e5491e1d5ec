"""Training of LoRA adapters: gradients against fp64, the products that run, and when peft's code must run."""

import copy
import warnings

import pytest
import torch
from diffusers.models.attention_processor import Attention
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import sdfastgn

pytestmark = pytest.mark.fused_on_cpu

DIM, TEXT = 16, 12
ALL = ("to_q", "to_k", "to_v", "to_out.0")


def add(model, name, targets, **options):
    options = {"r": 3, "lora_alpha": 6, "init_lora_weights": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft: the model has adapters already
        inject_adapter_in_model(LoraConfig(target_modules=list(targets), **options), model, name)


def attention(targets=ALL, second=False, r=3, **options):
    """An attention module with adapters of rank r. ``second``: with a second adapter of another scale."""
    torch.manual_seed(3)
    model = Attention(DIM, heads=2, dim_head=8, **options).train()
    if targets:
        add(model, "a", targets, r=r)
    if second:
        add(model, "b", targets, r=2, lora_alpha=1)
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.set_adapter(["a", "b"])
    return model


def cast(model, dtype):
    """Gives the frozen parameters ``dtype``. Those of the adapters stay fp32."""
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)
    return model


def inputs(context):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 7, DIM), *([(2, 5, TEXT)] if context else [])]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def trained(model, tensors, dtype=torch.float32, call=None):
    """(result, {name: gradient}) of a step, under autocast if ``dtype`` has 16 bits. Values are in fp64."""
    model.zero_grad()
    wide = next(p for p in model.parameters() if p.requires_grad).dtype
    x, *context = (t.to(wide).requires_grad_(i == 0) for i, t in enumerate(tensors))
    with torch.autocast("cpu", dtype, enabled=dtype.itemsize == 2):
        y = call(model, x, *context) if call else model(x, *context)
    y.to(wide).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return y.detach(), {"x": x.grad, **grads}


def errors(found, exact):
    """Relative errors of the result and of all gradients."""
    (y, grads), (true, expected) = found, exact
    assert grads.keys() == expected.keys()
    square = sum((grads[name].double() - expected[name]).norm() ** 2 for name in expected)
    whole = sum(gradient.norm() ** 2 for gradient in expected.values())
    return float((y.double() - true).norm() / true.norm()), float((square / whole) ** 0.5)


CASES = {
    "self": ({}, False, 4),
    "bias": ({"bias": True}, False, 4),
    "cross": ({"cross_attention_dim": TEXT}, True, 6),
    "some": ({"targets": ("to_q", "to_v")}, False, 3),
    "large-rank": ({"r": 24}, False, 8),
    "two": ({"second": True}, False, 4),
    "two-cross": ({"second": True, "cross_attention_dim": TEXT}, True, 6),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_layers_that_read_the_same_run_as_one(case, dtype, products):
    options, context, count = CASES[case]
    stock = cast(attention(**options), dtype)
    ours = sdfastgn.optimize(copy.deepcopy(stock))
    tensors = inputs(context)
    exact = trained(copy.deepcopy(stock).double(), tensors, torch.float64)
    expected = trained(stock, tensors, dtype)
    products.clear()
    found = trained(ours, tensors, dtype)
    assert len(products) == count
    assert all(found[1][name].dtype is gradient.dtype for name, gradient in expected[1].items())
    assert found[0].dtype is expected[0].dtype
    for error, bound in zip(errors(found, exact), errors(expected, exact), strict=True):
        assert error <= 1.3 * bound + 1e-7


@pytest.mark.parametrize("order", ["not-merged", "added-later"])
def test_without_merged_weights(order, products):
    stock = attention(targets=ALL if order == "not-merged" else [])
    ours = sdfastgn.optimize(copy.deepcopy(stock), merge_adapters=False)
    if order == "added-later":
        for model in (stock, ours):
            torch.manual_seed(4)
            add(model, "a", ALL)
    exact = trained(copy.deepcopy(stock).double(), inputs(False), torch.float64)
    products.clear()
    assert max(errors(trained(ours, inputs(False)), exact)) < 1e-6
    assert len(products) == 4


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "not-merged"])
def test_a_layer_by_itself(merges, products):
    torch.manual_seed(3)
    stock = nn.Sequential(nn.Linear(DIM, 8))
    add(stock, "a", ["0"], lora_alpha=0)
    tensors = inputs(False)
    model = nn.Sequential(copy.deepcopy(stock), nn.GroupNorm(1, 7))
    ours = sdfastgn.optimize(model, merge_adapters=merges)[0]
    exact = trained(copy.deepcopy(stock).double(), tensors, torch.float64)
    products.clear()
    assert max(errors(trained(ours, tensors), exact)) < 1e-6
    assert len(products) == 2
    with torch.no_grad():
        assert torch.equal(ours(*tensors), stock(*tensors)) or merges
    assert type(sdfastgn.restore(model)[0][0]) is type(stock[0])


def test_with_checkpoints_gradients_have_the_same_bits():
    model = sdfastgn.optimize(cast(attention(), torch.bfloat16))
    once, twice = (
        trained(model, inputs(False), torch.bfloat16, call)
        for call in (None, lambda m, x: checkpoint(m, x, use_reentrant=False))
    )
    assert all(torch.equal(once[1][name], twice[1][name]) for name in once[1])


def change(model, name):
    wrapper = model.to_v
    if name == "dropout":
        wrapper.lora_dropout["a"] = nn.Dropout(0.5)
    elif name == "dora":
        add(model, "c", ["to_v"], use_dora=True)
        wrapper.set_adapter("c")
    elif name == "off":
        wrapper.enable_adapters(False)
    elif name == "hook":
        wrapper.register_forward_hook(lambda *_: None)
    elif name == "trained-layer":
        wrapper.base_layer.weight.requires_grad_()
    elif name == "lora-bias":
        add(model, "c", ["to_v"], lora_bias=True)
        wrapper.set_adapter("c")
    else:
        cast(model, torch.bfloat16)


@pytest.mark.parametrize(
    "name", ["dropout", "dora", "off", "hook", "trained-layer", "lora-bias", "dtypes-without-autocast"]
)
def test_other_adapters_run_pefts_code(name, linear_calls):
    stock = attention()
    ours = sdfastgn.optimize(copy.deepcopy(stock))
    found = []
    for model in (stock, ours):
        torch.manual_seed(4)
        change(model, name)
        linear_calls.clear()
        torch.manual_seed(5)
        x = inputs(False)[0].to(model.to_q.base_layer.weight.dtype)
        y = model(x)
        y.square().mean().backward()
        found.append((y, [p.grad for p in model.parameters() if p.grad is not None]))
        assert model.to_v.base_layer in linear_calls
    (expected, grads), (y, own) = found
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-2 if "dtypes" in name else 1e-5)
    assert len(own) == len(grads)
    for a, b in zip(own, grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=2e-2 if "dtypes" in name else 1e-4)


def test_restore_gives_each_weight_its_own_memory():
    model = attention()
    sdfastgn.optimize(model)
    bases = [getattr(model, name).base_layer.weight for name in ("to_q", "to_k", "to_v")]
    assert bases[1].data_ptr() == bases[0].data_ptr() + bases[0].nbytes
    values = [p.detach().clone() for p in model.parameters()]
    sdfastgn.restore(model)
    assert bases[1].data_ptr() != bases[0].data_ptr() + bases[0].nbytes
    assert all(map(torch.equal, model.parameters(), values))
