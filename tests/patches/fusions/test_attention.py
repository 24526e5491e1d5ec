"""The fused ``Attention``: how many matrix products it runs, and when diffusers' own forward must run."""

import copy

import pytest
import torch
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    SlicedAttnProcessor,
)
from torch.utils.checkpoint import checkpoint

import sdfastgn
from sdfastgn.kernels.attention import few_keys as short_attention
from sdfastgn.patches.fusions import attention
from sdfastgn.patches.layers import packed_weights as packing
from tests.kernels import samples as kernel_samples
from tests.patches import cases
from tests.patches.cases import noise

pytestmark = pytest.mark.fused_on_cpu

DIM, TEXT = 16, 12


X, CONTEXT = noise(2, 7, DIM), noise(2, 5, TEXT, seed=1)


def twins(**options):
    """(fused, stock) with the same weights."""
    torch.manual_seed(2)
    stock = Attention(DIM, **{"heads": 2, "dim_head": 8, **options}).eval()
    with torch.no_grad():
        for p in stock.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    fused = copy.deepcopy(stock)
    assert attention.FUSION.claims(fused)
    assert attention.FUSION.reason_to_skip(fused) is None
    attention.FUSION.apply(fused)
    return fused, stock


def call(model, x=X, *args, **kwargs):
    with torch.no_grad():
        return model(x, *args, **kwargs)


def agree(a, b):
    assert a.stride() == b.stride()
    cases.agree(a, b)


@pytest.fixture
def called(products):
    """Names of an attention's layers that have a product of their own: ``called(model, *args)``."""

    def called(model, *args, **kwargs):
        products.clear()
        call(model, *args, **kwargs)
        return [name for _, w, *_ in products for name in ALL if w is getattr(model, name).weight]

    return called


ALL = ["to_q", "to_k", "to_v"]


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    ("options", "context", "alone"),
    [
        pytest.param({}, None, [], id="self"),
        pytest.param({"cross_attention_dim": TEXT}, CONTEXT, ["to_q"], id="cross"),
        pytest.param({}, noise(2, 3, DIM, seed=3), ["to_q"], id="self-used-as-cross"),
        pytest.param({"cross_attention_dim": DIM}, None, [], id="cross-used-as-self"),
        pytest.param({"kv_heads": 2}, None, [], id="kv-heads"),
    ],
)
def test_layers_that_read_the_same_are_one_product(called, options, context, alone, bias):
    fused, stock = twins(bias=bias, **options)
    agree(call(fused, X, context), call(stock, X, context))
    assert called(fused, X, context) == alone
    assert called(stock, X, context) == ALL


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("factor", [1.0, 1.7])
def test_images_with_a_norm_and_a_residual(called, layout, factor):
    options = {
        "norm_num_groups": 4,
        "residual_connection": True,
        "bias": True,
        "rescale_output_factor": factor,
    }
    fused, stock = twins(**options)
    x = noise(2, DIM, 3, 4).contiguous(memory_format=layout)
    agree(call(fused, x, temb=noise(2, 9)), call(stock, x, temb=noise(2, 9)))
    assert called(fused, x) == []
    agree(call(fused, X), call(stock, X))


def test_dropout_and_what_replaces_the_last_layer():
    fused, stock = (model.train() for model in twins(dropout=0.5))
    for model in (fused, stock):
        model.to_out[0].register_forward_hook(lambda m, i, y: y + 3)
    found, expected = (torch.manual_seed(3) and call(model) for model in (fused, stock))
    assert (expected == 0).any()
    agree(found, expected)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(AttnProcessor, {}, id="without-sdpa"),
        pytest.param(lambda: SlicedAttnProcessor(1), {}, id="sliced"),
        pytest.param(
            lambda: cases.ip_adapter_processor(DIM, TEXT),
            {"encoder_hidden_states": (CONTEXT, [noise(2, 1, 3, TEXT, seed=5)])},
            id="ip-adapter",
        ),
        pytest.param(cases.Tinted, {"tint": 0.3}, id="argument-of-its-own"),
    ],
)
def test_other_processors_run_upstreams_forward(called, make, options):
    fused, stock = twins(cross_attention_dim=TEXT)
    options = {"encoder_hidden_states": CONTEXT, **options}
    for model in (fused, stock):
        model.set_processor(make())
    assert torch.equal(call(fused, **options), call(stock, **options))
    for model in (fused, stock):
        model.set_processor(AttnProcessor2_0())
    agree(call(fused, X, CONTEXT), call(stock, X, CONTEXT))
    assert called(fused, X, CONTEXT) == ["to_q"]


@pytest.mark.parametrize(
    ("args", "options"),
    [
        pytest.param((X, None, noise(2, 1, 7) * -9), {}, id="mask"),
        pytest.param((X,), {"scale": 0.5}, id="deprecated-scale"),
        pytest.param((X,), {"unknown": 1}, id="unknown-argument"),
        pytest.param((X, noise(1, 5, DIM)), {}, id="one-context-for-all"),
    ],
)
def test_calls_that_run_upstreams_forward(called, args, options):
    fused, stock = twins()
    assert torch.equal(call(fused, *args, **options), call(stock, *args, **options))
    assert called(fused, *args, **options) == ALL


@pytest.mark.parametrize(
    "frozen", [pytest.param(False, id="all-train"), pytest.param(True, id="gradient-of-the-input")]
)
def test_gradients_are_upstreams(frozen):
    fused, stock = (model.train().requires_grad_(not frozen) for model in twins(bias=True))

    def gradients(model, wrap=False):
        model.zero_grad()
        x = X.clone().requires_grad_()
        y = checkpoint(model, x, use_reentrant=False) if wrap else model(x)
        y.square().mean().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if not frozen)]

    expected = gradients(stock)
    for wrap in (False, True):
        assert all(map(torch.equal, gradients(fused, wrap), expected))


def test_gradients_decide_whether_the_layers_are_one(called, monkeypatch):
    fused, _ = twins()
    joined = []
    monkeypatch.setattr(attention, "joined", lambda *a: joined.append(1) or packing.joined(*a))
    fused(X)
    assert not joined
    fused.requires_grad_(False)(X)
    assert joined


def test_autocast(called):
    fused, stock = twins(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = call(fused), call(stock)
        assert called(fused) == ALL
    assert y.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(y, expected)


def test_functional_transforms_and_other_weights():
    fused, stock = twins()
    other = {name: p.detach() * 2 for name, p in fused.named_parameters()}

    def ensemble(model):
        stacked = {name: torch.stack((p.detach(), p.detach() * 2)) for name, p in model.named_parameters()}
        return torch.vmap(lambda weights: torch.func.functional_call(model, weights, (X,)))(stacked)

    with torch.no_grad():
        agree(torch.func.functional_call(fused, other, (X,)), torch.func.functional_call(stock, other, (X,)))
        torch.testing.assert_close(ensemble(fused), ensemble(stock), atol=2e-5, rtol=2e-5)


def test_traced_modules_do_not_reach_beyond_a_parameter(tmp_path):
    fused, stock = twins()
    with torch.no_grad():
        traced = torch.jit.trace(fused, (X,), check_trace=False)
    traced.save(tmp_path / "traced.pt")
    del fused
    agree(call(torch.jit.load(tmp_path / "traced.pt")), call(stock))


@kernel_samples.interpreted
@pytest.mark.parametrize(
    ("autocast", "gradients", "tokens", "few"),
    [
        pytest.param(False, False, 77, True, id="prompt"),
        pytest.param(False, False, 129, False, id="many-keys"),
        pytest.param(True, False, 77, False, id="autocast"),
        pytest.param(False, True, 77, False, id="gradients"),
    ],
)
def test_a_prompts_few_keys_have_their_own_kernel(autocast, gradients, tokens, few, monkeypatch):
    fused, stock = (m.half() for m in twins(cross_attention_dim=TEXT))
    x, context = X.half(), noise(2, tokens, TEXT, seed=1).half()
    found = []
    monkeypatch.setattr(
        attention,
        "attend_to_few",
        lambda *heads: found.append(short_attention.attend_to_few(*heads)) or found[-1],
    )
    with (
        kernel_samples.kernels(direct=True),
        torch.autocast("cpu", torch.float16, autocast),
        torch.set_grad_enabled(gradients),
    ):
        y = fused(x, context)
    assert [h is not None for h in found] == ([few] if not (autocast or gradients) else [])
    truth = call(copy.deepcopy(stock).double(), x.double(), context.double())
    assert kernel_samples.error(y, truth) < 1.1 * kernel_samples.error(call(stock, x, context), truth)


def test_an_images_few_tokens_are_pytorchs(monkeypatch):
    """Each image size has another number of tokens, and would compile another kernel."""
    monkeypatch.setattr(attention, "attend_to_few", lambda *heads: pytest.fail("compiles a kernel"))
    fused, stock = twins()
    with kernel_samples.kernels(direct=True):
        agree(call(fused), call(stock))


# --- GPU ------------------------------------------------------------------------------------------


def large(dtype=torch.float16, **options):
    fused = Attention(640, heads=10, dim_head=64, **options).to("cuda", dtype).eval()
    stock = copy.deepcopy(fused)
    return sdfastgn.optimize(fused), stock


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernel_samples.DTYPES)
def test_on_a_gpu(called, dtype):
    fused, stock = large(dtype, cross_attention_dim=768)
    x, context = noise(2, 1024, 640).to("cuda", dtype), noise(2, 77, 768).to("cuda", dtype)
    bounds = {"atol": 2e-2, "rtol": 2e-2} if dtype is not torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    torch.testing.assert_close(call(fused, x, context), call(stock, x, context), **bounds)
    assert called(fused, x, context) == ["to_q"]
    fused, stock = large(dtype)
    torch.testing.assert_close(call(fused, x), call(stock, x), **bounds)
    assert called(fused, x) == []


@pytest.mark.gpu
def test_no_copy_of_queries_keys_and_values():
    """Attention reads them directly from the result of the product: two products and one attention."""
    fused, _ = large(out_bias=False)
    x = noise(2, 1024, 640).to("cuda", torch.float16)
    call(fused, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(fused, x)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type is torch.autograd.DeviceType.CUDA]
    assert not [n for n in names if "copy" in n.lower() or "elementwise" in n], names


@pytest.mark.gpu
def test_a_captured_graph_follows_weights_that_are_written_to():
    fused, stock = large()
    x = noise(2, 1024, 640).to("cuda", torch.float16)
    call(fused, x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = fused(x)
    for model in (fused, stock):
        with torch.no_grad():
            model.to_v.weight.mul_(2)
            model.to_q.weight.data.add_(0.01)
    graph.replay()
    torch.testing.assert_close(y, call(stock, x), atol=2e-2, rtol=2e-2)
