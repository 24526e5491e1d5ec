"""Merged weights of LoRA layers: their values, and the calls for which peft's own code must run."""

import copy
import pickle
import threading
import warnings
from unittest import mock

import pytest
import torch
from peft import LoHaConfig, LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from triton.runtime import interpreter
from triton.runtime.errors import OutOfResources

import sdfastgn
from sdfastgn.kernels.common import dispatch
from sdfastgn.models.architectures import build_unet, unet_inputs
from sdfastgn.patches.lora import merged_weights, merging
from sdfastgn.patches.lora.merging import adopt, is_merged, merged_layer, release
from sdfastgn.patches.lora.wrappers import subclasses
from tests.kernels.samples import interpreted, kernels

pytestmark = pytest.mark.fused_on_cpu


def model_with(layer, **options):
    torch.manual_seed(3)
    model = nn.Sequential(layer).eval()
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **options}
    return inject_adapter_in_model(LoraConfig(target_modules=["0"], **options), model, "a")


def more(model, name, **options):
    config = LoraConfig(target_modules=["0"], r=2, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft: the model has adapters already
        inject_adapter_in_model(config, model, name)


def in_fp64(wrapper):
    """The merged weight and bias in fp64, from peft's formula."""
    base = wrapper.base_layer
    weight, bias = base.weight.double(), 0 if base.bias is None else base.bias.double()
    for name in wrapper.active_adapters:
        a, b = wrapper.lora_A[name].weight.double(), wrapper.lora_B[name].weight.double()
        weight = weight + wrapper.scaling[name] * (b.flatten(1) @ a.flatten(1)).view(weight.shape)
        if wrapper.lora_B[name].bias is not None:
            bias = bias + wrapper.scaling[name] * wrapper.lora_B[name].bias.double()
    return weight, bias


LAYERS = {
    "linear": (lambda: nn.Linear(12, 20), (5, 12), {}),
    "no-bias": (lambda: nn.Linear(12, 20, bias=False), (2, 5, 12), {}),
    "rslora": (lambda: nn.Linear(12, 20), (5, 12), {"use_rslora": True}),
    "lora-bias": (lambda: nn.Linear(12, 20), (5, 12), {"lora_bias": True}),
    "convolution": (lambda: nn.Conv2d(6, 10, 3, padding=1), (2, 6, 8, 8), {}),
    "stride": (lambda: nn.Conv2d(6, 10, 3, stride=2, padding=1, bias=False), (2, 6, 8, 8), {}),
    "pointwise": (lambda: nn.Conv2d(6, 10, 1), (2, 6, 8, 8), {"lora_bias": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_values(name, dtype):
    build, shape, options = LAYERS[name]
    model = model_with(build(), **options).to(dtype)
    more(model, "b", lora_bias=options.get("lora_bias", False))
    wrapper = model[0].to(dtype)
    x = torch.randn(shape, dtype=dtype)
    assert [*adopt(model)] == [wrapper]
    for names, scales in ((["a"], [1.0]), (["a", "b"], [0.5, -2.0]), (["b"], [0.0]), ([], [])):
        wrapper.set_adapter(names)
        for adapter, scale in zip(names, scales, strict=True):
            wrapper.set_scale(adapter, scale)
        weight, bias = in_fp64(wrapper)
        layer = merged_layer(wrapper)
        assert type(layer) in (nn.Linear, nn.Conv2d)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(layer.weight.double(), weight, rtol=0.51 * eps, atol=4e-7)
        true = copy.copy(layer)
        true.__dict__["_parameters"] = {
            "weight": nn.Parameter(weight),
            "bias": nn.Parameter(bias) if torch.is_tensor(bias) else None,
        }
        truth = true(x.double())
        ours = (model(x) - truth).norm()
        with torch.enable_grad():  # peft's own code
            stock = (model(x) - truth).norm()
        assert ours <= 1.2 * stock + 1e-5


@interpreted
@torch.no_grad()
def test_weights_whose_kernel_cannot_be_compiled(monkeypatch):
    """Merging goes on in plain PyTorch, and the report names the op and the reason."""
    error = OutOfResources(262_248, 232_448, "shared memory")
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", mock.Mock(side_effect=error))
    model = model_with(nn.Linear(12, 20))
    adopt(model)
    with kernels(direct=True), pytest.warns(UserWarning, match="add_low_rank runs in plain PyTorch"):
        weight = merged_layer(model[0]).weight
    reasons = sdfastgn.report(model).without_kernels
    dispatch.ops_off.clear()
    torch.testing.assert_close(weight.double(), in_fp64(model[0])[0], atol=1e-6, rtol=1e-6)
    assert "262248" in reasons["add_low_rank on cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [300, 512])
@torch.no_grad()
def test_high_ranks_in_fp32_on_the_gpu(rank):
    unet = build_unet("tiny", torch.float16, "cuda")
    inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float16, device="cuda", seed=0)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=rank, target_modules=targets, init_lora_weights=False), adapter_name="a")
    for name, parameter in unet.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.float()
    expected = unet(**inputs).sample
    sdfastgn.optimize(unet)
    for _ in range(4):  # eager, captured and replayed
        error = (unet(**inputs).sample - expected).float().norm() / expected.float().norm()
        assert error < 1e-2
    report = sdfastgn.report(unet)
    assert report.merged[0].layers
    assert not report.without_kernels
    wrapper = next(m for m in unet.modules() if is_merged(m))
    torch.testing.assert_close(
        merged_layer(wrapper).weight.double(), in_fp64(wrapper)[0], atol=1e-3, rtol=1e-3
    )


def test_parameters_stay_the_same_objects_with_the_same_bits():
    model = model_with(nn.Linear(12, 20))
    keys, objects = list(model.state_dict()), [*model.parameters()]
    values = [p.detach().clone() for p in objects]
    classes = [type(m) for m in model.modules()]
    adopt(model)
    with torch.no_grad():
        model(torch.randn(3, 12))
    assert list(model.state_dict()) == keys
    assert all(p is q for p, q in zip(model.parameters(), objects, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(objects, values, strict=True))
    names = [type(m).__name__ for m in model.modules()]
    release(model)
    assert [type(m) for m in model.modules()] == classes
    assert [type(m).__name__ for m in model.modules()] == names
    assert not is_merged(model[0])


def test_set_adapter_runs_only_if_it_changes_something(monkeypatch):
    ours, stock = (model_with(nn.Linear(12, 20)) for _ in range(2))
    more(ours, "b"), more(stock, "b")
    adopt(ours)
    ran, set_adapter = [], BaseTunerLayer.set_adapter
    monkeypatch.setattr(
        BaseTunerLayer,
        "set_adapter",
        lambda self, *args, **kwargs: (ran.append(self), set_adapter(self, *args, **kwargs)),
    )
    both = ["a", "b"]
    for names, change, is_needed in (
        (["a"], lambda m: None, True),
        (["a"], lambda m: None, False),
        (both, lambda m: None, True),
        (["a", "b"], lambda m: None, False),
        (both, lambda m: m.requires_grad_(False), True),
        (both, lambda m: m[0].lora_B["b"].weight.requires_grad_(False), True),
        (both, lambda m: more(m, "c"), True),  # the new adapter is active
        (both, lambda m: m[0].lora_A["c"].requires_grad_(True), True),
        (both, lambda m: m[0].set_scale("a", 0.3), False),
        ("a", lambda m: None, True),
        ("a", lambda m: None, True),
    ):
        change(ours), change(stock)
        ran.clear()
        ours[0].set_adapter(names)
        assert bool(ran) == is_needed
        stock[0].set_adapter(names)
        assert ours[0].active_adapters == stock[0].active_adapters
        assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in stock.parameters()]


# What peft's own code must run: (change of the model, words of the reason).
NOT_MERGED = {
    "dora": (lambda m: more(m, "c", use_dora=True) or m[0].set_adapter("c"), "variant"),
    "hook": (lambda m: m[0].register_forward_hook(lambda *_: None), "hooks"),
    "base-hook": (lambda m: m[0].base_layer.register_forward_hook(lambda *_: None), "hooks"),
    "inner-hook": (lambda m: m[0].lora_B["a"].register_forward_hook(lambda *_: None), "hooks"),
    "dropout": (lambda m: m[0].lora_dropout.update({"a": nn.Dropout(0.1)}), "dropout"),
    "tensor-scale": (lambda m: m[0].scaling.update(a=torch.tensor(0.5)), "scale is a Tensor"),
    "fp64": (lambda m: m.double(), "fp16, bf16 or fp32"),
}


@pytest.mark.parametrize("name", NOT_MERGED)
@torch.no_grad()
def test_layers_that_are_not_merged(name):
    change, words = NOT_MERGED[name]
    model = model_with(nn.Linear(12, 20))
    adopt(model)
    assert merged_layer(model[0]) is not None
    change(model)
    assert words in merging.why_not(model[0])
    assert merged_layer(model[0]) is None
    assert adopt(model) == []
    assert not is_merged(model[0])  # its memory is free again


def test_other_kinds_and_groups_are_not_merged():
    loha = inject_adapter_in_model(LoHaConfig(target_modules=["0"]), nn.Sequential(nn.Linear(4, 4)))
    assert adopt(loha) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grouped = model_with(nn.Conv2d(8, 8, 3, groups=2))
    assert adopt(grouped) == []


@torch.no_grad()
def test_a_convolution_whose_adapter_sees_other_windows_is_not_merged():
    dilated = model_with(nn.Conv2d(6, 10, 3, padding=1, dilation=1))
    assert adopt(dilated)
    for name, value in (("dilation", (2, 2)), ("padding_mode", "circular"), ("stride", (2, 2))):
        model = copy.deepcopy(dilated)
        setattr(model[0].base_layer, name, value)
        assert merged_layer(model[0]) is None
    # Code for seamless images changes all convolutions.
    seamless, stock = copy.deepcopy(dilated), copy.deepcopy(dilated)
    for model in (seamless, stock):
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.padding_mode = "circular"
    release(stock)
    assert merged_layer(seamless[0]) is not None
    x = torch.randn(2, 6, 8, 8)
    torch.testing.assert_close(seamless(x), stock(x), atol=1e-5, rtol=1e-5)


def test_with_gradients_adapters_are_not_merged():
    model = model_with(nn.Linear(12, 20))
    x = torch.randn(3, 12)
    model(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    adopt(model)
    with torch.no_grad():
        model(x)
    model(x).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == found.keys()
    assert any("lora_A" in name for name in found)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_step_of_an_optimizer_shows_in_the_next_call():
    model = model_with(nn.Linear(12, 20))
    stock = copy.deepcopy(model)
    adopt(model)
    x = torch.randn(3, 12)
    model(x)
    for m in (model, stock):
        with torch.enable_grad():
            optimizer = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1)
            m(x).sum().backward()
        optimizer.step()
    torch.testing.assert_close(model(x), stock(x))


@torch.no_grad()
def test_copies_and_pickles():
    model = model_with(nn.Linear(12, 20))
    x = torch.randn(3, 12)
    expected = model(x)
    adopt(model)
    model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "layer" not in vars(other[0])
        torch.testing.assert_close(other(x), expected)
        other[0].set_scale("a", 3.0)
        assert not torch.allclose(other(x), expected)
    torch.testing.assert_close(model(x), expected)


@torch.no_grad()
def test_moves_and_dtypes():
    model = model_with(nn.Conv2d(6, 10, 3))
    stock = copy.deepcopy(model)
    adopt(model)
    x = torch.randn(2, 6, 8, 8)
    torch.testing.assert_close(model(x), stock(x), atol=1e-5, rtol=1e-5)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype), stock.to(dtype)
        y = model(x.to(dtype))
        assert y.dtype is dtype
        assert (y - stock(x.to(dtype))).abs().max() < (0.05 if dtype is torch.bfloat16 else 1e-5)


@torch.no_grad()
def test_autocast():
    model = model_with(nn.Linear(64, 64))
    stock = copy.deepcopy(model)
    adopt(model)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x), stock(x)
    assert y.dtype is expected.dtype
    assert (y - expected).abs().max() < 0.05


def test_without_memory_stocks_code_runs(monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("for the test")

    unet = build_unet("tiny", torch.float32, "cpu")
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), adapter_name="a")
    with monkeypatch.context() as short:
        short.setattr(merged_weights, "_stand_in", fail)
        sdfastgn.optimize(unet)
    report = sdfastgn.report(unet)
    assert not report.merged
    assert "no memory for merged weights" in report.skipped[0].reason
    sdfastgn.optimize(unet)  # tries again
    assert sdfastgn.report(unet).merged


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["auto", False])
@torch.no_grad()
def test_every_layer_of_a_unet(graphs):
    unet = build_unet("tiny", torch.float32, "cpu")
    stock = copy.deepcopy(unet)
    inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0)
    targets = r".*\.(to_[qkv]|to_out\.0|proj|proj_\w+|net\.2|conv\d?|conv_shortcut|\w+_proj|linear_\d)"
    for model in (unet, stock):
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model.add_adapter(config, adapter_name="a")
    sdfastgn.optimize(unet, cuda_graphs=graphs)
    for scale in (1.0, 0.3):
        for model in (unet, stock):
            for module in model.modules():
                if hasattr(module, "set_scale"):
                    module.set_scale("a", scale)
        expected = stock(**inputs).sample
        torch.testing.assert_close(unet(**inputs).sample, expected, atol=3e-4, rtol=3e-3)
        scaled = {**inputs, "cross_attention_kwargs": {"scale": 0.5}}
        torch.testing.assert_close(unet(**scaled).sample, stock(**scaled).sample, atol=3e-4, rtol=3e-3)
    [merged] = sdfastgn.report(unet).merged
    assert merged.layers == sum(hasattr(m, "set_scale") for m in unet.modules())


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False], ids=["before-optimize", "after-optimize"])
@torch.no_grad()
def test_layouts_of_first_and_last_convolutions(is_first, monkeypatch):
    unet = build_unet("tiny", torch.float32, "cpu")
    stock = copy.deepcopy(unet)
    inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0)
    if not is_first:
        sdfastgn.optimize(unet, cuda_graphs=False)
    for model in (unet, stock):
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=["conv_in", "conv_out"], init_lora_weights=False)
        model.add_adapter(config, adapter_name="a")
    sdfastgn.optimize(unet, cuda_graphs=False)
    first, last = map(merged_layer, (unet.conv_in, unet.conv_out))
    seen, convolve = {}, nn.Conv2d._conv_forward

    def note(conv, x, *args):
        seen[conv] = x.is_contiguous(memory_format=torch.channels_last)
        return convolve(conv, x, *args)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", note)
    sample = unet(**inputs).sample
    assert (seen[first], seen[last], sample.is_contiguous()) == (True, True, True)
    torch.testing.assert_close(sample, stock(**inputs).sample, atol=3e-4, rtol=3e-3)


@torch.no_grad()
def test_hooks_of_a_replaced_layer_do_not_run():
    model = model_with(nn.Conv2d(6, 10, 3))
    adopt(model)
    x, called = torch.randn(2, 6, 8, 8), []
    model(x)
    old = model[0].base_layer
    model[0].base_layer = copy.deepcopy(old)
    old.register_forward_pre_hook(lambda *args: called.append("before"))
    old.register_forward_hook(lambda *args: called.append("after"))
    model(x)
    assert is_merged(model[0])
    assert called == []


@torch.no_grad()
def test_other_code_in_the_layer_is_not_copied():
    """While another thread runs, ``optimize`` puts gates into all modules."""
    unet = build_unet("tiny", torch.float32, "cpu")
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), adapter_name="a")
    x = torch.randn(2, 3, 40)
    layer = next(m for m in unet.modules() if hasattr(m, "set_scale") and m.in_features == 40)
    expected, done = layer(x), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        sdfastgn.optimize(unet)
    finally:
        done.set()
        thread.join()
    torch.testing.assert_close(layer(x), expected)
    assert is_merged(layer)


@torch.no_grad()
def test_stocks_code_sees_no_merged_weights():
    model = model_with(nn.Linear(12, 20))
    stock = copy.deepcopy(model)
    adopt(model)
    x = torch.randn(3, 12)
    with sdfastgn.kernels.common.dispatch.stock_code():
        assert torch.equal(model(x), stock(x))


@pytest.mark.slow
@pytest.mark.parametrize("with_gradients", [True, False], ids=["gradients", "no-gradients"])
@pytest.mark.parametrize("merges", [True, False], ids=["merged", "not-merged"])
def test_compiled_as_one_graph(merges, with_gradients):
    ours = model_with(nn.Linear(12, 20)).append(nn.GroupNorm(4, 20))
    stock = copy.deepcopy(ours)
    sdfastgn.optimize(ours, cuda_graphs=False, merge_adapters=merges)
    assert type(ours[0]) is subclasses()[type(stock[0])]
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    x = torch.randn(5, 12, requires_grad=with_gradients)
    for change in (
        lambda m: None,
        lambda m: m[0].set_scale("a", 0.3),
        lambda m: m[0].lora_B["a"].weight.data.mul_(2),
        lambda m: m[0].merge(),
        lambda m: m[0].enable_adapters(False),  # the next forward subtracts the adapter
    ):
        change(ours), change(stock)
        with torch.set_grad_enabled(with_gradients):
            found, expected = compiled(x), stock(x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        with torch.no_grad():  # not compiled: runs merged weights if ``merges``
            torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
        if with_gradients:
            wanted = [[x, *(p for p in m.parameters() if p.requires_grad)] for m in (ours, stock)]
            gradients = torch.autograd.grad(found.square().sum(), wanted[0], allow_unused=True)
            truth = torch.autograd.grad(expected.square().sum(), wanted[1], allow_unused=True)
            torch.testing.assert_close(gradients, truth, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_threads_that_call_while_one_changes_the_scale():
    model = model_with(nn.Linear(12, 20))
    stock = copy.deepcopy(model)
    adopt(model)
    x = torch.randn(3, 12)
    scales = (0.5, 2.0)
    with torch.no_grad():
        expected = []
        for scale in scales:
            stock[0].set_scale("a", scale)
            expected.append(stock(x))
    wrong, done = [], threading.Event()

    def draw():
        with torch.no_grad():
            while not done.is_set():
                y = model(x)
                if not any(torch.allclose(y, e, atol=1e-5) for e in expected):
                    wrong.append(y)

    model[0].set_scale("a", scales[0])
    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(200):
        model[0].set_scale("a", scales[i % 2])
        with torch.no_grad():
            model(x)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected[1])
