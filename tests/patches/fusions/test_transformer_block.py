"""The fused ``BasicTransformerBlock``: when it fuses, when diffusers' own forward runs, and its error."""

import copy
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.checkpoint import checkpoint

import sdfastgn
from sdfastgn.patches.fusions import transformer_block
from sdfastgn.patches.layers import tokens
from tests.kernels.samples import DTYPES, HALVES
from tests.patches import cases
from tests.patches.cases import agree

pytestmark = pytest.mark.fused_on_cpu

DIM, TEXT = 20, 12
FUSED = ["norm1", "add norm2", "add norm3"]


def noise(*shape, seed=0, dtype=torch.float32):
    """Random values with a mean far above their spread. The spread differs from token to token."""
    g = torch.Generator().manual_seed(seed)
    spread = torch.rand((*shape[:-1], 1), generator=g) + 0.1
    return (torch.randn(shape, generator=g) * spread + 5).to(dtype)


X, CONTEXT = noise(2, 7, DIM), noise(2, 5, TEXT, seed=1)


def block(**options):
    torch.manual_seed(2)
    options = {"num_attention_heads": 2, "attention_head_dim": 10, "cross_attention_dim": TEXT, **options}
    made = BasicTransformerBlock(DIM, **options).eval()
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.5 + 0.5)
    return made


def twins(**options):
    """(fused, stock) with the same weights."""
    stock = block(**options)
    return fuse(copy.deepcopy(stock)), stock


def fuse(model):
    """Apply only this fusion. The fusions of the block's parts have their own tests."""
    assert transformer_block.FUSION.reason_to_skip(model) is None
    transformer_block.FUSION.apply(model)
    return model


def call(model, x=X, context=CONTEXT, **options):
    with torch.no_grad():
        return model(x, encoder_hidden_states=context, **options)


@pytest.fixture
def ran(monkeypatch):
    """Which norms of the block named in ``ran.block`` ran in sdfastgn's ops."""

    class Ran(list):
        block: Any

        def note(self, prefix, weight):
            self.append(
                prefix
                + next(n for n, m in self.block.named_children() if getattr(m, "weight", None) is weight)
            )

    ran = Ran()

    def layer_norm(x, weight, bias, eps, quantizer):
        ran.note("", weight)
        return sdfastgn.layer_norm(x, weight, bias, eps)

    def add_layer_norm(x, residual, weight, bias, eps, quantizer):
        ran.note("add ", weight)
        return sdfastgn.add_layer_norm(x, residual, weight, bias, eps)

    monkeypatch.setattr(tokens, "layer_norm", layer_norm)
    monkeypatch.setattr(tokens, "add_layer_norm", add_layer_norm)
    return ran


@pytest.mark.parametrize(
    ("options", "norms"),
    [
        pytest.param({}, FUSED, id="cross-attention"),
        pytest.param({"cross_attention_dim": None}, ["norm1", "add norm3"], id="self-attention-alone"),
        pytest.param({"only_cross_attention": True}, FUSED, id="cross-attention-twice"),
        pytest.param({"attention_type": "gated"}, FUSED, id="gligen-that-is-off"),
        pytest.param({"attention_out_bias": False, "ff_bias": False}, FUSED, id="no-biases"),
        pytest.param({"activation_fn": "gelu", "norm_eps": 0.3}, FUSED, id="gelu-and-eps"),
    ],
)
def test_each_add_runs_with_the_norm_behind_it(ran, options, norms):
    fused, stock = twins(**options)
    ran.block = fused
    agree(call(fused), call(stock))
    assert ran == norms


@pytest.mark.parametrize(
    ("build", "options"),
    [
        pytest.param(
            {"attention_type": "gated"},
            {"cross_attention_kwargs": {"gligen": {"objs": CONTEXT}}},
            id="gligen",
        ),
        pytest.param({}, {"cross_attention_kwargs": {"scale": 0.5}}, id="deprecated-scale"),
        pytest.param({}, {"x": X[:, None]}, id="images"),
    ],
)
def test_calls_that_run_upstreams_forward(ran, build, options):
    fused, stock = twins(**build)
    if options.get("x") is not None:  # an attention that keeps four axes, as upstream's squeeze expects
        for model in (fused, stock):
            model.attn1.set_processor(lambda attn, x, **_: x * 2)
    if "gated" in build.values():
        for model in (fused, stock):
            nn.init.ones_(model.fuser.alpha_attn)
        assert not torch.equal(call(stock, **options), call(stock))
    assert torch.equal(call(fused, **options), call(stock, **options))
    assert ran == []


def test_chunked_feed_forward_set_later_runs_upstreams_forward(ran):
    fused, stock = twins()
    x, context = noise(2, 6, DIM), CONTEXT
    for model in (fused, stock):
        model.set_chunk_feed_forward(2, dim=1)
    assert torch.equal(call(fused, x, context), call(stock, x, context))
    assert ran == []


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("norm", "norms"),
    [
        pytest.param("norm1", ["add norm2", "add norm3"], id="norm1"),
        pytest.param("norm2", ["norm1", "add norm3"], id="norm2"),
        pytest.param("norm3", ["norm1", "add norm2"], id="norm3"),
    ],
)
@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward", "subclass"])
def test_a_norm_that_is_watched_or_replaced_is_called(ran, norm, norms, how):
    fused, stock = twins()
    ran.block = fused
    seen = {}
    for name, model in (("fused", fused), ("stock", stock)):
        inner, found = getattr(model, norm), seen.setdefault(name, [])
        if how == "hook":
            inner.register_forward_hook(lambda m, i, o, found=found: found.append(o) or o * 2)
        elif how == "pre-hook":
            inner.register_forward_pre_hook(lambda m, i, found=found: found.append(i[0]) or (i[0] * i[0],))
        elif how == "forward":
            inner.forward = lambda x, stock=inner.forward, found=found: found.append(x) or stock(x) * 2
        else:
            replaced = Doubled(DIM)
            replaced.load_state_dict(inner.state_dict())
            setattr(model, norm, replaced)
    agree(call(fused), call(stock))
    assert ran == norms
    assert len(seen["fused"]) == len(seen["stock"]) == (how != "subclass")
    for a, b in zip(seen["fused"], seen["stock"], strict=True):
        agree(a, b)


def test_masks_reach_the_attentions(ran):
    fused, stock = twins()
    ran.block = fused
    own, cross = torch.zeros(2, 1, 7), torch.zeros(2, 1, 5)
    own[..., 3:], cross[..., 1:] = -1e4, -1e4
    masks = {"attention_mask": own, "encoder_attention_mask": cross}
    agree(call(fused, **masks), call(stock, **masks))
    assert ran == FUSED
    for name in masks:
        assert not torch.allclose(call(stock, **{name: masks[name]}), call(stock))


class Half:
    """A processor whose result has another dtype than the residual, so that the sum promotes."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        return AttnProcessor2_0()(attn, hidden_states, encoder_hidden_states, attention_mask).to(
            torch.bfloat16
        )


class OneToken:
    """A processor whose result has another shape than the residual, so that the sum broadcasts."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        return AttnProcessor2_0()(attn, hidden_states, encoder_hidden_states, attention_mask)[:, :1]


@pytest.mark.parametrize(
    ("make", "options", "norms"),
    [
        pytest.param(AttnProcessor, {}, FUSED, id="without-sdpa"),
        pytest.param(
            lambda: cases.ip_adapter_processor(DIM, TEXT),
            {"context": (CONTEXT, [noise(2, 1, 3, TEXT, seed=5)])},
            FUSED,
            id="ip-adapter",
        ),
        pytest.param(
            cases.Tinted, {"cross_attention_kwargs": {"tint": 0.3}}, FUSED, id="argument-of-its-own"
        ),
        pytest.param(Half, {}, ["norm1", "add norm2"], id="other-dtype"),
        pytest.param(OneToken, {}, ["norm1", "add norm2"], id="other-shape"),
    ],
)
def test_processors_that_are_set_after_optimize(ran, make, options, norms):
    fused, stock = twins()
    ran.block, before = fused, call(stock)
    for model in (fused, stock):
        model.attn2.set_processor(make())
    after = call(stock, **options)
    agree(call(fused, **options), after)
    assert ran == norms
    assert make is AttnProcessor or not torch.allclose(after, before)
    for model in (fused, stock):
        model.attn2.set_processor(AttnProcessor2_0())
    agree(call(fused), before)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_and_a_norm_that_is_trained_with_it(ran, when):
    stock = block()
    fused = copy.deepcopy(stock)
    plain = call(stock)
    if when == "after":
        fuse(fused)
    for model in (fused, stock):
        torch.manual_seed(6)
        config = LoraConfig(
            r=4,
            target_modules=["to_q", "to_out.0", "net.2"],
            modules_to_save=["norm2"],
            init_lora_weights=False,
        )
        inject_adapter_in_model(config, model)
    if when == "before":
        fuse(fused)
    ran.block = fused
    assert not torch.allclose(call(stock), plain, atol=1e-2)
    agree(call(fused), call(stock))
    assert ran == ["norm1", "add norm3"]


@pytest.mark.parametrize("is_large", [True, False], ids=["large", "small"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_and_checkpointing(dropout, is_large, ran, monkeypatch):
    """For small tensors, an autograd node in Python takes longer than the kernel saves."""
    monkeypatch.setattr(tokens, "_TRAINING_ELEMENTS", X.numel() + (not is_large))
    fused, stock = (model.train() for model in twins(dropout=dropout, final_dropout=dropout > 0))

    def gradients(model, wrap):
        model.zero_grad()
        x = X.clone().requires_grad_()
        torch.manual_seed(8)
        y = checkpoint(model, x, None, CONTEXT, use_reentrant=False) if wrap else model(x, None, CONTEXT)
        y.square().mean().backward()
        return [x.grad, *(p.grad.clone() for p in model.parameters())]

    expected = gradients(stock, False)
    ran.block = fused
    found = gradients(fused, False)
    assert ran == (FUSED if is_large else [])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    for a, b in zip(gradients(fused, True), found, strict=True):
        assert torch.equal(a, b)


def test_double_precision_is_kept():
    fused, stock = (model.double() for model in twins())
    x, context = X.double(), CONTEXT.double()
    torch.testing.assert_close(call(fused, x, context), call(stock, x, context), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("is_optimized_first", [False, True], ids=["hooked-first", "optimized-first"])
def test_hooks_that_skip_whole_blocks(is_optimized_first):
    """SkipLayerGuidance and AutoGuidance set such hooks. They look blocks up by their exact class."""
    hooks = pytest.importorskip("diffusers.hooks.layer_skip", reason="not before diffusers 0.35")

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([block(), block()])

        def forward(self, x, **options):
            return self.blocks[1](self.blocks[0](x, **options), **options)

    stock = Blocks()
    whole = call(stock)
    ours = copy.deepcopy(stock)
    if is_optimized_first:
        sdfastgn.optimize(ours)
    for model in (stock, ours):
        hooks.apply_layer_skip(model, hooks.LayerSkipConfig(indices=[0], fqn="blocks"))
    sdfastgn.optimize(ours)
    agree(call(ours), call(stock))
    assert not torch.allclose(call(ours), whole)
    assert torch.equal(call(sdfastgn.restore(ours)), call(stock))


def _errors(dtype, device):
    """Mean square error of (fused, stock) against fp64 with the same rounded weights and input."""
    fused, stock = (model.to(device, dtype) for model in twins())
    truth = copy.deepcopy(stock).double()
    totals = [0.0, 0.0]
    for seed in range(8):
        x = noise(2, 64, DIM, seed=seed, dtype=dtype).to(device)
        context = noise(2, 5, TEXT, seed=seed + 50, dtype=dtype).to(device)
        expected = call(truth, x.double(), context.double())
        for i, model in enumerate((fused, stock)):
            totals[i] += (call(model, x, context).double() - expected).square().mean().item()
    return totals[0], totals[1]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_error_is_not_above_stocks(dtype, device):
    ours, stock = _errors(dtype, device)
    # As for whole models. The sum is rounded with the last bias in it, which now and then is in the
    # next power of two.
    assert 0 < ours**0.5 <= stock**0.5 * 1.05


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_on_a_gpu(dtype, autocast):
    fused, stock = (model.to("cuda", dtype) for model in twins())
    x, context = X.to("cuda", dtype), CONTEXT.to("cuda", dtype)
    with torch.autocast("cuda", torch.float16, enabled=autocast):
        y, expected = call(fused, x, context), call(stock, x, context)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(
        y, expected, atol=1e-5 if dtype is torch.float32 and not autocast else 5e-2, rtol=1e-2
    )
