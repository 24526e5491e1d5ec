"""``optimize(verify=True)``: what is right stays, what is wrong is put back with its error."""

import copy

import pytest
import torch
from diffusers import (
    AutoencoderTiny,
    ControlNetModel,
    UNet2DConditionModel,
    UNet2DModel,
)
from torch import nn
from torch.utils._pytree import tree_map

import sdfastgn
from sdfastgn import api, verification
from sdfastgn.kernels.common import dispatch
from sdfastgn.model_inputs import small_call
from sdfastgn.patches import patcher
from sdfastgn.patches.fusions.geglu import FusedGEGLU
from sdfastgn.patches.fusions.resnet_block import FusedResnetBlock2D
from sdfastgn.verification import PUT_BACK, RIGHT, UNVERIFIED
from tests.kernels.samples import interpreted, kernels
from tests.patches import samples
from tests.patches.group_norm_32 import GroupNorm32
from tests.patches.samples import each_block, each_fusion, each_sample, randomize, snapshot

pytestmark = pytest.mark.fused_on_cpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def in_dtype(module, call, dtype):
    """``call`` with all floats cast to ``dtype``. A list is cast in place: caches of videos are lists."""

    def cast(t):
        if isinstance(t, list):
            t[:] = map(cast, t)
        return t.detach().to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    def called(*args, **kwargs):
        args, kwargs = tree_map(cast, (args, kwargs), is_leaf=lambda t: isinstance(t, list))
        return module(*args, **kwargs)

    try:
        with torch.no_grad():
            return call(called)
    except NotImplementedError as error:  # 3-D pooling of halves on a CPU
        pytest.skip(str(error))


def check(build, call, dtype):
    module = randomize(build()).to(dtype)
    for part in module.modules():
        if isinstance(part, GroupNorm32):
            part.float()  # its weights stay in fp32 in a model of halves, else it raises
    sdfastgn.optimize(module, cuda_graphs=False)
    fused = list(dict.fromkeys(f.module for f in patcher.inspect(module)))
    recorded = verification.record(fused, lambda: in_dtype(module, call, dtype))
    for part, inputs in recorded.items():
        with torch.no_grad():
            error, stock_error, bound = verification.compare(part, inputs)
        assert error <= bound, (type(part), error, stock_error)
    assert recorded


@pytest.mark.drawn(7)
@each_sample
def test_every_fusion_is_right(build, call):
    check(build, call, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@each_fusion
def test_every_fusion_is_right_in_halves(build, call, dtype):
    check(build, call, dtype)


@pytest.mark.slow
@each_block
@interpreted
def test_every_kernel_is_right(build, call):
    """In halves. ``test_failures`` runs the kernels of larger parts too, in fp32."""
    with kernels(direct=True):
        check(build, call, torch.float16)


UNET = {
    "in_channels": 4, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 24,
    "attention_head_dim": 8, "norm_num_groups": 8, "transformer_layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}  # fmt: skip
UP = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
SDXL = {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}  # fmt: skip


def unet(**options):
    return randomize(UNet2DConditionModel(**UNET, **UP, **options))


def vae():
    return randomize(samples.vae(block_out_channels=(16, 32), norm_num_groups=8))


def plain_unet():
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return randomize(
        UNet2DModel(block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, **blocks)
    )


def tiny_vae():
    blocks = {f"{half}_block_out_channels": (16, 16) for half in ("encoder", "decoder")}
    counts = {f"num_{half}_blocks": (1, 1) for half in ("encoder", "decoder")}
    return randomize(AutoencoderTiny(**blocks, **counts))


MODELS = [
    unet, lambda: unet(**SDXL), vae, tiny_vae, plain_unet, lambda: randomize(ControlNetModel(**UNET)),
]  # fmt: skip
NAMES = ["unet", "sdxl", "vae", "tiny-vae", "unet-2d", "controlnet"]
each_model = pytest.mark.parametrize("build", MODELS, ids=NAMES)


def statuses(model):
    return {e.path: e.status for e in sdfastgn.report(model).entries}


def output(model):
    with torch.no_grad():
        return small_call(model, torch.float32, torch.device("cpu"))()[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("build", MODELS, ids=NAMES)
def test_a_healthy_model_stays_fused(build, recwarn):
    model = build()
    before = snapshot(model)
    sdfastgn.optimize(model, verify=True)
    assert not [w for w in recwarn if "verify" in str(w.message)]
    assert set(statuses(model).values()) == {"fused"}
    found = api.verdicts(model)
    assert {v.status for v in found} == {RIGHT}
    assert {v.path for v in found} == set(statuses(model))
    sdfastgn.restore(model)
    assert snapshot(model) == before


def test_under_autocast_a_healthy_model_stays_fused():
    with torch.autocast("cpu", torch.bfloat16):
        model = sdfastgn.optimize(vae(), verify=True)
    assert set(statuses(model).values()) == {"fused"}


def test_another_default_device_is_not_the_models(recwarn):
    model = vae()
    with torch.device("meta"):
        sdfastgn.optimize(model, verify=True)
    assert not [w for w in recwarn if "verify" in str(w.message)]


class Keeps(nn.Module):
    """Adds the input of the call before."""

    def __init__(self):
        super().__init__()
        self.before = None

    def forward(self, x):
        before, self.before = self.before, x
        return x if before is None else x + before


def test_each_call_starts_from_the_same_kept_tensors():
    module = Keeps()
    assert verification.compare(module, ((torch.ones(3),), {}))[0] == 0
    assert module.before is None


def test_autoencoder_tiny_in_half_precision():
    """AutoencoderTiny's own forward would pass fp32 to the decoder."""
    model = sdfastgn.optimize(tiny_vae().to(torch.bfloat16), verify=True)
    assert {v.status for v in api.verdicts(model)} == {RIGHT}


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch 2.8 has the older alone")
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_after_a_newer_switch_of_tf32_was_set(precision, monkeypatch):
    """PyTorch then raises if the older switches are read."""
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", precision)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    model = sdfastgn.optimize(tiny_vae(), verify=True)
    assert {v.status for v in api.verdicts(model)} == {RIGHT}


def scaled(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs) * 1.02


def not_a_number(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs) * torch.nan


def failing(forward):
    def fail(*args, **kwargs):
        raise TypeError("a bug")

    return fail


def without_output(forward):
    return lambda self, x: (forward(self, x), None)[1]


@pytest.fixture(params=[scaled, not_a_number, failing, without_output])
def broken(request, monkeypatch):
    """GEGLU's fused forward is broken while kernels run."""
    forward = FusedGEGLU.forward
    broken = request.param(forward)
    stock = FusedGEGLU.__mro__[1].forward
    monkeypatch.setattr(
        FusedGEGLU, "forward", lambda self, x: (broken if dispatch.has_kernels(x) else stock)(self, x)
    )


@pytest.mark.slow
def test_a_wrong_part_is_put_back(broken):
    model = unet()
    stock = copy.deepcopy(model)
    before = snapshot(model)
    with pytest.warns(
        UserWarning, match=r"sdfastgn.optimize: verify=True, \d of \d+ parts put back: verif"
    ) as seen:
        sdfastgn.optimize(model, verify=True)
    assert [w.filename for w in seen] == [__file__]
    gates = {path for path, status in statuses(model).items() if status == "skipped"}
    assert gates
    assert all(path.endswith("ff.net.0") for path in gates)
    assert "verification: it" in str(sdfastgn.report(model))
    assert len(sdfastgn.report(model).fused) > 20
    torch.testing.assert_close(output(model), output(stock), atol=2e-5, rtol=2e-5)
    sdfastgn.optimize(model)  # remembers
    assert gates == {path for path, status in statuses(model).items() if status == "skipped"}
    sdfastgn.restore(model)
    assert snapshot(model) == before
    assert set(statuses(model).values()) == {"fusable"}


@pytest.mark.drawn(1)
def test_strict_is_an_error_and_changes_nothing(broken):
    model = unet()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"sdfastgn.optimize: verify=True.* put back"):
        sdfastgn.optimize(model, verify=True, strict=True)
    assert snapshot(model) == before


def test_a_wrong_container_alone_is_put_back(monkeypatch):
    forward, stock = FusedResnetBlock2D.forward, FusedResnetBlock2D.__mro__[1].forward

    def wrong_forward(self, x, *args, **kwargs):
        if not dispatch.has_kernels(x):
            return stock(self, x, *args, **kwargs)
        return forward(self, x, *args, **kwargs) + 0.1

    monkeypatch.setattr(FusedResnetBlock2D, "forward", wrong_forward)
    model = sdfastgn.optimize(vae())
    wrong = [v for v in api.verdicts(model) if v.status == PUT_BACK]
    assert {v.kind for v in wrong} == {"ResnetBlock2D"}
    assert all(v.error > 4 * v.stock_error for v in wrong)


def test_what_cannot_be_verified_is_said():
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU())
    with pytest.warns(UserWarning, match="2 of 2 parts not verified: there are no inputs for a Sequential"):
        sdfastgn.optimize(model, verify=True)
    assert len(sdfastgn.report(model).fused) == 2


def test_kernels_that_fail_meanwhile_are_no_verdict(monkeypatch):
    """Plain PyTorch ran instead of the kernel, so the report must not say that the part is right."""
    forward = FusedGEGLU.forward
    monkeypatch.setattr(dispatch, "why_off", None)

    def turned_off(self, x):
        if dispatch.why_off is None:
            dispatch.turn_off("no C compiler")
        return forward(self, x)

    monkeypatch.setattr(FusedGEGLU, "forward", turned_off)
    model = sdfastgn.optimize(unet())
    with pytest.warns(UserWarning, match="no C compiler"):
        found = api.verdicts(model)
    assert {v.reason for v in found if v.status != RIGHT} == {"no kernel runs: no C compiler"}
    assert {v.status for v in found if v.path.endswith("ff.net.0")} == {UNVERIFIED}


@pytest.mark.slow
def test_a_model_with_dropout_in_training_keeps_its_mode():
    model = unet(dropout=0.5).train()
    sdfastgn.optimize(model, verify=True)
    assert all(m.training for m in model.modules())
    assert set(statuses(model).values()) == {"fused"}


@pytest.mark.without_kernels
def test_where_no_kernel_runs_there_is_nothing_to_verify():
    model = vae()
    with pytest.warns(UserWarning, match="not verified: no kernel runs: its weights are on no GPU"):
        sdfastgn.optimize(model, verify=True)
    assert {v.status for v in api.verdicts(model)} == {UNVERIFIED}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("build", MODELS, ids=NAMES)
def test_kernels_on_a_gpu_are_right(build, dtype):
    model = sdfastgn.optimize(build().to("cuda", dtype), verify=True)
    assert set(statuses(model).values()) == {"fused"}
    assert {v.status for v in api.verdicts(model)} == {RIGHT}
    assert sdfastgn.report(model).channels_last_weights > 0
