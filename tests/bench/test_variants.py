"""Variants over their registry: applied, same output, undone without a trace, also when they break."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.bench import environment, stable_fast
from sdfastgn.bench.snapshot import Snapshot, modules_of
from sdfastgn.bench.variants import VARIANTS, Variant, prepared
from sdfastgn.kernels.common import dispatch
from sdfastgn.models.architectures import build_unet, build_vae, build_video_network
from sdfastgn.models.configurations import VIDEO_NETWORKS
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8 import product as fp8_product
from tests import small_video

CPU = torch.device("cpu")


class Block(nn.Module):
    """A stock module with what variants touch: 4-D weights, a GroupNorm, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 4, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)


class Pipe:
    """The part of a pipeline that variants see."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {
            "unet": Block(),
            "vae": Block(),
            "safety_checker": Block(),
            "scheduler": 1,
        }
        self.image_processor = type("Processor", (), {})()
        self.unet = self.components["unet"]


def state(module: nn.Module) -> list[Any]:
    return [(name, type(part), sorted(vars(part))) for name, part in module.named_modules()] + [
        (name, parameter.stride(), id(parameter)) for name, parameter in module.named_parameters()
    ]


@pytest.fixture
def module() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def test_eager_is_first_and_stable_fast_last():
    assert (next(iter(VARIANTS)), list(VARIANTS)[-1]) == ("eager", "stable_fast")
    for variant in VARIANTS.values():
        reason = variant.available(CPU)
        assert reason is None or (reason.strip() and "\n" not in reason)


# torch.compile is prepared here and not run: it would take a minute of C++.
# ``sdfastgn_fp8`` refuses a module without transformer blocks.
# ``compile_blocks`` refuses one without lists of blocks.
OTHERS = ("stable_fast", "sdfastgn_fp8", "compile_blocks")
APPLIED = [variant for name, variant in VARIANTS.items() if name not in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("variant", APPLIED, ids=[variant.name for variant in APPLIED])
def test_applied_and_undone(variant, module):
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        stock, before = module(x), state(module)
        with prepared(variant, module, "vae"):
            assert (state(module) != before) == (variant.name != "eager")
            if "compile" not in variant.name:
                torch.testing.assert_close(module(x), stock, rtol=1e-5, atol=1e-5)
        assert state(module) == before
        assert torch.equal(module(x), stock)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "sd35"])  # diffusers lists the repeated blocks of the first only
def test_repeated_blocks_are_compiled(name, module, monkeypatch):
    small_video.shrink(monkeypatch)
    model = build_video_network(VIDEO_NETWORKS[name]["transformer"], torch.float32, "cpu")
    before = state(model)
    with prepared(VARIANTS["compile_blocks"], model, "transformer"):
        blocks = [*model.transformer_blocks, *getattr(model, "single_transformer_blocks", ())]
        assert all(block._compiled_call_impl is not None for block in blocks)
        assert model._compiled_call_impl is None
    assert state(model) == before
    with (
        pytest.raises(RuntimeError, match="a Block has no repeated blocks"),
        prepared(VARIANTS["compile_blocks"], module, "vae"),
    ):
        pass


@pytest.mark.usefixtures("without_gradients")
def test_fp8_is_ready_when_its_products_know_their_scales(monkeypatch):
    variant = VARIANTS["sdfastgn_fp8"]
    assert "not on an NVIDIA GPU" in variant.available(CPU)
    monkeypatch.setattr(fp8, "device_reason", lambda device: None)
    unet = build_unet("tiny", torch.bfloat16, "cpu")
    with prepared(variant, unet, "unet"):
        assert not variant.is_ready(unet)
        monkeypatch.setattr(fp8_product, "CALLS", 0)
        assert variant.is_ready(unet)
    assert not sdfastgn.report(unet).fp8


def test_only_unet_and_vae_of_a_pipeline_change_layout():
    pipe = Pipe()
    with prepared(VARIANTS["channels_last"], pipe, "pipeline"):
        layouts = {
            name: part.decoder[0].weight.is_contiguous(memory_format=torch.channels_last)
            for name, part in modules_of(pipe).items()
        }
    assert layouts == {"unet": True, "vae": True, "safety_checker": False}
    assert all(part.decoder[0].weight.is_contiguous() for part in modules_of(pipe).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["channels_last", "compile_channels_last"])
def test_weights_of_both_convolutions_are_channels_last(name):
    images, video = nn.Conv2d(8, 8, 3), nn.Conv3d(8, 8, 3)
    module = nn.Sequential(images, video)
    with prepared(VARIANTS[name], module, "unet"):
        assert images.weight.is_contiguous(memory_format=torch.channels_last)
        assert video.weight.is_contiguous(memory_format=torch.channels_last_3d)
        assert (module._compiled_call_impl is not None) == ("compile" in name)
    assert images.weight.is_contiguous()
    assert video.weight.is_contiguous()


def test_compile_reaches_the_decoder_that_decode_calls(module):
    with prepared(VARIANTS["compile"], module, "vae"):
        assert module.decoder._compiled_call_impl is not None
        assert module._compiled_call_impl is None
    assert module.decoder._compiled_call_impl is None


def test_a_patched_model_is_compiled_and_both_are_taken_back(module):
    variant = VARIANTS["sdfastgn_compile"]
    with prepared(variant, module, "vae"):
        assert sdfastgn.report(module).fused
        assert variant.describe(module) == VARIANTS["sdfastgn"].describe(module)
        assert module.decoder._compiled_call_impl is not None
    assert not sdfastgn.report(module).fused
    assert module.decoder._compiled_call_impl is None


@pytest.mark.parametrize(
    ("name", "mode"), [("sdfastgn", "auto"), ("sdfastgn_eager", "False"), ("sdfastgn_compile", "False")]
)
def test_who_replays_graphs(name, mode):
    variant, vae = VARIANTS[name], build_vae("tiny", torch.float32, "cpu")
    with prepared(variant, vae, "vae"):
        assert {graphs.mode for graphs in sdfastgn.report(vae).graphs} == {mode}
    assert variant.replays_graph == (mode == "auto")  # else the harness captures its call
    assert {graphs.mode for graphs in sdfastgn.report(vae).graphs} == {"False"}


@pytest.mark.usefixtures("without_gradients")
def test_who_runs_plans(module):
    for name in ("sdfastgn", "sdfastgn_eager", "sdfastgn_no_plans"):
        variant = VARIANTS[name]
        with prepared(variant, module, "vae"):
            module(torch.randn(2, 4, 8, 8))
            on = {planned.is_on for planned in sdfastgn.report(module).plans}
            assert on == {name != "sdfastgn_no_plans"}
            said = variant.describe(module)
        assert ("no plan: no kernels run for torch.float32 on cpu" in said) == (name != "sdfastgn_no_plans")
    named = [variant.name for variant in VARIANTS.values() if not variant.is_in_all]
    assert named == ["sdfastgn_no_plans", "compile_blocks"]


@pytest.mark.fused_on_cpu
@pytest.mark.usefixtures("without_gradients")
def test_plans_are_counted(module):
    with prepared(VARIANTS["sdfastgn"], module, "vae"):
        module(torch.randn(2, 4, 8, 8))
        assert VARIANTS["sdfastgn"].describe(module) == "2 fused, 0 skipped, 1 plan"


def _breaking(where: str) -> Variant:
    def apply(target: Any, part: str, undo: contextlib.ExitStack) -> None:
        target.decoder.forward = lambda x: x
        target.decoder.extra = 1
        target.to(memory_format=torch.channels_last)
        target.decoder[1].register_forward_hook(lambda *args: None)
        if where == "apply":
            raise RuntimeError("broken")

    return Variant("breaking", "breaking", lambda device: None, apply)


@pytest.mark.parametrize("where", ["apply", "body"])
def test_a_breaking_variant_leaves_no_trace(where, module):
    before = state(module)
    with pytest.raises(RuntimeError, match="broken"), prepared(_breaking(where), module, "unet"):
        raise RuntimeError("broken")
    assert state(module) == before
    assert not module.decoder[1]._forward_hooks


def test_snapshot_puts_classes_parameters_and_pipeline_attributes_back():
    pipe = Pipe()
    snapshot = Snapshot(pipe)
    weight, kind = pipe.unet.decoder[0].weight, type(pipe.unet.decoder)
    pipe.unet.decoder[0].weight = nn.Parameter(torch.zeros(1))
    pipe.unet.decoder.__class__ = type("Swapped", (kind,), {})
    pipe.image_processor.postprocess = "patched"
    pipe.unet = None
    snapshot.restore()
    assert pipe.unet.decoder[0].weight is weight
    assert type(pipe.unet.decoder) is kind
    assert not vars(pipe.image_processor)


# ---- stable-fast, which is not installed where the tests run: a package of its name and shape stands in


@pytest.fixture
def sfast_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sfast"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('must not be imported to be found')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize(
    ("built", "device", "expected"),
    [
        pytest.param(False, "cuda", "is not built", id="no-extension"),
        pytest.param(True, "cpu", "needs CUDA", id="no-gpu"),
        pytest.param(True, "cuda", None, id="usable"),
    ],
)
def test_reasons_for_stable_fast(sfast_folder, built, device, expected):
    if built:
        (sfast_folder / "_C.cpython-311-x86_64-linux-gnu.so").touch()
    reason = stable_fast.reason(torch.device(device))
    assert reason is None if expected is None else expected in str(reason)


def test_launch_functions_are_put_back(tmp_path, monkeypatch):
    jit = pytest.importorskip("triton.runtime.jit")
    package = tmp_path / "sfast"
    package.mkdir()
    (package / "__init__.py").touch()
    wrap = "from triton.runtime.jit import JITFunction\nstock = JITFunction.run\n"
    (package / "triton.py").write_text(wrap + "JITFunction.run = lambda *a, **k: stock(*a, **k)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sdfastgn.bench.stable_fast._wrapped", {})
    stock = jit.JITFunction.run
    seen = []
    try:
        for _ in range(2):
            with stable_fast.launch_functions():
                seen.append(jit.JITFunction.run)
            assert jit.JITFunction.run is stock
    finally:
        jit.JITFunction.run = stock
        for name in ("sfast", "sfast.triton"):
            sys.modules.pop(name, None)
    assert seen[0] is seen[1] is not stock


def test_plain_pytorch_gets_no_time(module, monkeypatch):
    monkeypatch.setattr(dispatch, "why_off", "no C compiler")
    environment.check_kernels_ran(CPU)
    with pytest.raises(RuntimeError, match="plain PyTorch ran and no kernel: no C compiler"):
        environment.check_kernels_ran(torch.device("cuda"))
    check, cuda = environment.check_kernels_ran, torch.device("cuda")
    monkeypatch.setattr(environment, "check_kernels_ran", lambda device: check(cuda))
    for name in ("sdfastgn", "sdfastgn_eager", "sdfastgn_compile"):
        with pytest.raises(RuntimeError, match="no C compiler"), prepared(VARIANTS[name], module, "vae"):
            pass
        assert not sdfastgn.report(module).fused
