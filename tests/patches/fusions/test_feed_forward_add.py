"""The last add of ``BasicTransformerBlock``: part of a plain feed-forward's last product, or stock's add."""

import copy

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import transformer_block
from sdfastgn.patches.layers import tokens
from tests.kernels import samples
from tests.patches import cases, changes
from tests.patches.cases import WHERE, noise

DIM, TEXT = 20, 12
pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device")]


@pytest.fixture
def products(monkeypatch):
    """A list with one entry for each call of a block: True if its last product adds itself to the sum."""
    found = []
    asked = tokens._adds_in_product
    monkeypatch.setattr(tokens, "_adds_in_product", lambda *a: found.append(asked(*a)) or found[-1])
    return found


def twins(**options):
    """(fused, stock) with the same weights."""
    torch.manual_seed(2)
    options = {"num_attention_heads": 2, "attention_head_dim": 10, "cross_attention_dim": TEXT, **options}
    stock = BasicTransformerBlock(DIM, **options).eval()
    with torch.no_grad():
        for p in stock.parameters():
            p.copy_(torch.randn_like(p) * (0.5 if p.dim() == 1 else 0.3) + (p.dim() == 1))
    stock.to(WHERE["device"])
    fused = copy.deepcopy(stock)
    assert transformer_block.FUSION.reason_to_skip(fused) is None
    transformer_block.FUSION.apply(fused)
    return fused, stock


def call(model, x=None, seed=0, **options):
    x = noise(2, 7, DIM, seed=seed) if x is None else x
    with torch.no_grad():
        return model(x, encoder_hidden_states=noise(2, 5, TEXT, seed=9, dtype=x.dtype), **options)


def agree(a, b):
    assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    cases.agree(a, b, 1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="geglu"),
        pytest.param({"ff_bias": False}, id="no-bias"),
        pytest.param({"activation_fn": "gelu"}, id="gelu"),
        pytest.param({"cross_attention_dim": None}, id="self-attention-alone"),
        pytest.param({"norm_elementwise_affine": False}, id="no-affine"),
    ],
)
def test_the_add_is_in_the_product(products, linear_calls, options):
    fused, stock = twins(**options)
    expected = call(stock)
    linear_calls.clear()
    agree(call(fused), expected)
    assert products == [True]
    assert fused.ff.net[2] not in linear_calls


def test_tensors_that_others_hold_are_not_written_to():
    fused, stock = twins()
    seen = []
    for inner in (fused.attn1, fused.attn2, fused.ff.net[0]):
        inner.register_forward_hook(lambda m, i, y: seen.extend((*i, y)))
    x = noise(2, 7, DIM)
    ys = [call(fused, x)]
    before = [t.clone() for t in (x, *seen, *ys)]
    held = [x, *seen, *ys]
    ys.append(call(fused, x))
    assert all(map(torch.equal, held, before))
    assert len({t.data_ptr() for t in (x, *ys)}) == 3
    agree(ys[1], call(stock, x))


def test_rows_with_gaps_and_no_rows(products):
    fused, stock = twins()
    x = noise(2, 7, 2 * DIM)[..., ::2]
    before = x.clone()
    agree(call(fused, x), call(stock, x.contiguous()))
    assert torch.equal(x, before)
    x = noise(2, 0, DIM)
    assert call(fused, x).shape == call(stock, x).shape
    assert products == [True, True]


@pytest.mark.parametrize("change", [*changes.WRITTEN, *changes.MOVED], ids=lambda f: f.__name__)
def test_edits_between_calls_count(products, change):
    fused, stock = twins()
    before = call(fused)
    for model in (fused, stock):
        change(model, "ff.net.2")
    agree(call(fused), call(stock))
    assert not torch.allclose(call(stock), before, atol=1e-3)
    for model in (fused, stock):
        model.ff.net[2].bias = None
    agree(call(fused), call(stock))
    assert all(products)


# --- where it is not ------------------------------------------------------------------------------


def of(change, path):
    """A parameter that makes ``change`` to the feed-forward or to one of its neighbors."""
    return pytest.param(lambda model: change(model, path), id=f"{path}-{change.__name__}")


class Halved(FeedForward):
    def forward(self, x):
        return super().forward(x) / 2


def subclass(model, path):
    model.get_submodule(path).__class__ = Halved


def another_layer_behind(model, path):
    model.get_submodule(path).append(nn.Tanh())


APART = [
    *(of(change, "ff.net.2") for change in changes.NOT_PLAIN),
    *(of(change, "ff") for change in (changes.hooked, changes.pre_hooked, changes.overridden, subclass)),
    of(changes.hooked, "norm3"),
    of(another_layer_behind, "ff.net"),
]


@pytest.mark.parametrize("change", APART)
def test_layers_that_are_not_plain_are_called(products, change):
    fused, stock = twins()
    before = call(stock)
    for model in (fused, stock):
        change(model)
    assert not torch.allclose(call(stock), before, atol=1e-3)
    agree(call(fused), call(stock))
    assert products == [False]


def test_final_dropout(products):
    for model in (pair := twins(final_dropout=True)):
        model.train()
    agree(*map(call, pair))
    assert products == [False]


def test_dropout_that_drops_is_called(products):
    pair = [model.train() for model in twins(dropout=0.4)]
    found, expected = (torch.manual_seed(3) and call(model) for model in pair)
    agree(found, expected)
    assert products == [True]
    assert not torch.allclose(found, call(pair[1].eval()), atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda h: h * 2, id="values"),
        pytest.param(lambda h: h[:, :1], id="one-token-for-all"),
        pytest.param(lambda h: h[:1], id="one-image-for-all"),
    ],
)
def test_what_a_hook_makes_of_the_gated_states_counts(products, change):
    fused, stock = twins()
    for model in (fused, stock):
        model.ff.net[0].register_forward_hook(lambda m, i, h: change(h))
    agree(call(fused), call(stock))
    assert products == [True]


def test_gradients_of_the_first_layer_alone(products, monkeypatch):
    """The input and everything before that layer need no gradient. Autograd handles in-place additions."""
    monkeypatch.setattr(tokens, "_TRAINING_ELEMENTS", 0)
    fused, stock = twins()
    found = []
    for model in (fused, stock):
        model.requires_grad_(False)
        torch.manual_seed(6)
        config = LoraConfig(r=2, target_modules=["net.0.proj"], init_lora_weights=False)
        inject_adapter_in_model(config, model)
        model(noise(2, 7, DIM), encoder_hidden_states=noise(2, 5, TEXT)).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert products == [True]
    assert len(found[0]) == 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_under_autocast_and_in_other_dtypes(products):
    fused, stock = twins()
    with torch.autocast(WHERE["device"], torch.bfloat16):
        torch.testing.assert_close(call(fused), call(stock), atol=5e-2, rtol=5e-2)
    x = noise(2, 7, DIM).double()
    for model in (fused, stock):
        model.double()
    torch.testing.assert_close(call(fused, x), call(stock, x), atol=1e-12, rtol=1e-12)
    assert products == [False]  # fp64, without kernels, is stock's own forward


def test_in_inference_mode(products):
    fused, stock = twins()
    with torch.inference_mode():
        agree(call(fused), call(stock))
    assert products == [True]


@pytest.mark.parametrize("dtype", samples.DTYPES[:2])
def test_error_is_not_above_stocks(products, dtype):
    samples.skip_cut_off(dtype, WHERE["device"])
    fused, stock = (model.to(dtype) for model in twins())
    truth = copy.deepcopy(stock).double()
    errors = [0.0, 0.0]
    for seed in range(8):
        x = noise(2, 16, DIM, seed=seed, dtype=dtype)
        expected = call(truth, x.double())
        for i, model in enumerate((fused, stock)):
            errors[i] += (call(model, x).double() - expected).square().mean().item()
    assert 0 < errors[0] <= errors[1]
    assert sum(products) == 8


def test_the_whole_of_optimize(products):
    _, stock = twins()
    fused = sdfastgn.optimize(copy.deepcopy(stock))
    agree(call(fused), call(stock))
    assert products == [True]
    sdfastgn.restore(fused)
    assert torch.equal(call(fused), call(stock))
