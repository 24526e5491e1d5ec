"""Where no kernel runs, an optimized module is stock's code: the same bits, layouts and exports."""

import copy
import importlib.util
import io
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn

import sdfastgn
from sdfastgn import api
from sdfastgn.kernels.common import dispatch
from tests.patches import samples
from tests.patches.samples import each_copy, each_sample
from tests.processes import process

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.without_kernels]


def channels_first(call):
    """``call`` with channels-first images."""

    def called(module):
        with pytest.MonkeyPatch.context() as patches:
            image = samples.image
            patches.setattr(
                samples,
                "image",
                lambda *shape, seed=0: image(*shape, seed=seed).detach().contiguous().requires_grad_(),
            )
            return call(module)

    return called


# What costs time, and what would be a change of layout.
HEAVY = {
    f"aten::{name}"
    for name in (
        "clone",
        "_to_copy",
        "cat",
        "convolution",
        "addmm",
        "bmm",
        "native_group_norm",
        "silu",
        "add",
    )
}


def run(module, call):
    """(counts of PyTorch's slow ops in forward and backward, [output, all gradients])"""
    with torch.profiler.profile() as profile:
        y = call(module)
        y.square().mean().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    # ``profile.events()`` would also make a tree of them, which takes most of the time.
    names = (event.name() for event in profile.profiler.kineto_results.events())
    return Counter(name for name in names if name in HEAVY), [y.detach(), *gradients]


@pytest.mark.drawn(6)
@each_sample
def test_an_optimized_module_runs_stocks_ops(build, call):
    """The same ops in the same layouts, forward and backward: no additional copy, and the same bits."""
    call = channels_first(call)
    stock = samples.randomize(build())
    fused = sdfastgn.optimize(copy.deepcopy(stock))
    assert sdfastgn.report(fused).fused
    (ops, got), (stock_ops, want) = run(fused, call), run(stock, call)
    assert ops == stock_ops
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("frozen", [False, True], ids=["x-needs-a-gradient", "x-needs-none"])
@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (2, 8, 3, 5, 6)], ids=["image", "video"])
def test_a_channels_last_norm_is_exact_far_from_zero(shape, frozen):
    """PyTorch's own channels-last kernel is inexact, and its backward crashes if x needs no gradient."""
    x = (torch.randn(shape) + 1e3).movedim(1, -1).contiguous().movedim(-1, 1).requires_grad_(not frozen)
    norm = sdfastgn.optimize(samples.randomize(nn.GroupNorm(2, 8)))
    y = norm(x)
    assert y.stride() == x.stride()
    truth = nn.functional.group_norm(
        x.detach().double().contiguous(), 2, norm.weight.double(), norm.bias.double()
    )
    torch.testing.assert_close(y.double(), truth, atol=1e-3, rtol=1e-3)
    y.sum().backward()
    assert norm.weight.grad.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    "view",
    [lambda w: w[::2], lambda w: w[:1].expand(8), lambda w: w[8:]],
    ids=["strided", "expanded", "offset"],
)
def test_a_norms_parameters_may_lie_anywhere(view, layout):
    norm = nn.GroupNorm(2, 8)
    norm.weight, norm.bias = (nn.Parameter(view(torch.randn(16))) for _ in range(2))
    x = torch.randn(2, 8, 5, 6).contiguous(memory_format=layout)
    expected = nn.functional.group_norm(x, 2, norm.weight.detach().clone(), norm.bias.detach().clone())
    assert torch.equal(sdfastgn.optimize(norm)(x), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_an_optimized_unet_is_exported_to_onnx(monkeypatch):
    """The export goes through TorchScript, which does not know sdfastgn's ops."""
    unet = sdfastgn.optimize(samples.randomize(samples.unet()))
    inputs = (torch.randn(1, 4, 8, 8), torch.tensor(3), torch.randn(1, 5, 12))
    if importlib.util.find_spec("onnx") is None:
        # It only adds functions of onnxscript to a model that is already exported.
        monkeypatch.setattr(
            "torch.onnx._internal.torchscript_exporter.onnx_proto_utils._add_onnxscript_fn", lambda m, _: m
        )
    buffer = io.BytesIO()
    torch.onnx.export(unet, inputs, buffer, dynamo=False)
    assert buffer.tell() > 10_000
    assert b"sdfastgn" not in buffer.getvalue()


def test_an_export_to_onnx_on_a_gpu_finds_no_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "is_supported", lambda x: True)
    x = torch.ones(1)
    found = []

    class Asks(nn.Module):
        def forward(self, x):
            found.append(dispatch.has_kernels(x))
            return x + 1

    torch.jit.trace(Asks(), x)
    assert found == [True] * len(found)
    found.clear()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    torch.jit.trace(Asks(), x, check_trace=False)
    assert found == [False]
    assert dispatch.has_kernels(x)  # outside of a trace


# --- what is said about it ------------------------------------------------------------------------


TRITON = SimpleNamespace(__version__="3.9")


@pytest.fixture
def forgotten(monkeypatch):
    """The warning, which is given once in a process, has not been given yet."""
    monkeypatch.setattr(api, "noted", set())


@pytest.mark.parametrize(
    ("has_gpu", "has_triton"), [(False, True), (True, False)], ids=["no-gpu", "no-triton"]
)
def test_a_machine_without_kernels_is_warned_of_once(forgotten, monkeypatch, has_gpu, has_triton):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(api, "triton", TRITON if has_triton else None)
    says = r"no kernel runs on this machine \((no CUDA GPU|triton is not installed)\)"
    with pytest.warns(UserWarning, match=says) as seen:
        [sdfastgn.optimize(nn.GroupNorm(2, 8)) for _ in range(2)]
    assert [w.filename for w in seen] == [__file__]


def test_a_model_on_the_cpu_of_a_machine_with_a_gpu_is_not_warned_of(forgotten, monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(api, "triton", TRITON)
    sdfastgn.optimize(nn.GroupNorm(2, 8))
    assert not recwarn.list


@pytest.mark.slow
def test_without_triton_a_model_is_stocks():
    code = (
        "import sys, warnings; sys.modules['triton'] = None\n"
        "import torch, sdfastgn\n"
        "from sdfastgn.cli import light_imports\n"
        "light_imports.import_model_classes()\n"
        "from torch import nn\n"
        "model, x = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), torch.randn(2, 8, 4, 4)\n"
        "expected = model(x)\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    same = [torch.equal(sdfastgn.optimize(model)(x), expected) for _ in range(2)]\n"
        "print(same, *[w.message for w in seen])\n"
        "print(sdfastgn.report(model).backend)\n"
    )
    output = process(sys.executable, "-c", code)
    assert output.returncode == 0, output.stderr
    assert output.stdout.startswith(
        "[True, True] sdfastgn.optimize: no kernel runs on this machine (triton is"
    )
    assert output.stdout.count("triton is not installed") == 2


def test_the_report_says_what_runs_and_why(monkeypatch):
    why = "the kernels need an NVIDIA GPU; the device is cpu"
    backend = sdfastgn.report(nn.GroupNorm(2, 8)).backend
    assert backend == f"plain PyTorch, stock's own code at stock's speed ({why})"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_meta = nn.GroupNorm(2, 8, device="meta")
    assert sdfastgn.report(on_meta).backend.endswith("at stock's speed (no CUDA GPU)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sdfastgn.report(on_meta).backend == ""  # where the weights go decides what runs
    monkeypatch.setattr(dispatch, "why_off", "no C compiler")
    assert sdfastgn.report(nn.GroupNorm(2, 8)).backend.endswith("at stock's speed (no C compiler)")


# --- layout ---------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """fp16 tensors count as tensors on a GPU, so ``.half()`` moves a model there."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: x.dtype is torch.float16)


def strides(module):
    return [p.stride() for p in module.parameters()]


def is_laid_out(unet):
    return unet.conv_out.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "arrive", [nn.Module.half, lambda m: m.to(torch.float16), lambda m: nn.Sequential(m).half()[0]]
)
def test_weights_are_laid_out_where_that_pays(gpu, arrive):
    unet = samples.randomize(samples.unet())
    before = strides(unet)
    sdfastgn.optimize(unet)
    assert strides(unet) == before
    assert sdfastgn.report(unet).channels_last_weights == 0
    weights = [id(p) for p in unet.parameters()]
    assert arrive(unet) is unet
    assert is_laid_out(unet)
    assert sdfastgn.report(unet).channels_last_weights > 10
    assert [id(p) for p in unet.parameters()] == weights
    laid_out = strides(unet)
    unet.float()  # parked
    assert strides(unet) == laid_out
    sdfastgn.restore(unet)
    assert strides(unet) == before
    unet.half()
    assert strides(unet) == before


def test_weights_that_are_there_are_laid_out_at_once(gpu):
    unet = sdfastgn.optimize(samples.unet().half())
    assert is_laid_out(unet)


def test_a_forward_where_no_kernel_runs_is_in_stocks_layout(gpu):
    unet = samples.randomize(samples.unet())
    stock = copy.deepcopy(unet)
    sdfastgn.optimize(unet).half().float()
    other = sdfastgn.optimize(samples.unet()).half()
    stock.half().float()  # rounded alike
    assert is_laid_out(unet)
    inputs = (torch.randn(1, 4, 8, 8), 3, torch.randn(1, 5, 12))
    with torch.no_grad():
        assert torch.equal(unet(*inputs).sample, stock(*inputs).sample)
    assert strides(unet) == strides(stock)
    assert is_laid_out(other)
    assert is_laid_out(unet.half())


@each_copy
def test_a_copy_is_laid_out_by_itself(gpu, copied):
    unet = sdfastgn.optimize(samples.unet())
    other = copied(unet)
    assert is_laid_out(other.half())
    assert not is_laid_out(unet)
    sdfastgn.restore(other)
    assert "_apply" not in vars(other)
    assert "_apply" in vars(unet)


def test_an_adapters_base_layer_is_laid_out_and_what_it_adds_is_not(gpu):
    unet = sdfastgn.optimize(samples.unet())
    unet.add_adapter(LoraConfig(r=2, target_modules=["conv1"], init_lora_weights=False))
    unet.half()
    convs = {
        path: m for path, m in unet.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)
    }
    laid_out = {
        path for path, m in convs.items() if m.weight.is_contiguous(memory_format=torch.channels_last)
    }
    assert any("base_layer" in path for path in laid_out)
    assert not any("lora" in path for path in laid_out)


def test_a_saved_model_is_stocks(tmp_path):
    """safetensors' own functions also save it. They refuse weights that are not contiguous."""
    unet = sdfastgn.optimize(samples.unet())
    save_file(unet.state_dict(), tmp_path / "unet.safetensors")
    assert load_file(tmp_path / "unet.safetensors").keys() == unet.state_dict().keys()
