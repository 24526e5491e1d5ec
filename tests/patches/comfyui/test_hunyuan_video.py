"""ComfyUI's autoencoder of HunyuanVideo 1.0, in chunks and in one."""

import pytest
import torch

from tests.patches import cases
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy.ldm.models.autoencoder import AutoencoderKL  # noqa: E402

from sdfastgn.patches.comfyui.inject import has_blocks, inject  # noqa: E402
from sdfastgn.patches.comfyui.report import parts_of  # noqa: E402
from tests.patches.children import are_called_as_in_stock, each_place  # noqa: E402
from tests.patches.comfyui import carried_cases  # noqa: E402
from tests.patches.comfyui.carried_cases import agree  # noqa: E402
from tests.patches.comfyui.comfy_models import snapshot, with_random_parameters  # noqa: E402

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("attention_of_pytorch", "on_each_device", "without_gradients"),
]


def build(**options):
    """As ``comfy/sd.py`` builds it, with fewer channels.

    Two resamplings: one of space alone, and one of time too.
    """
    sizes = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
        "ch_mult": [1, 1, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, "conv3d": True,
        "time_compress": 2, **options,
    }  # fmt: skip
    return AutoencoderKL(ddconfig=sizes, embed_dim=4)


def twins(**options):
    return carried_cases.twins(build(**options))


def decode_of(frames, batch=1):
    return lambda model: model.decode(cases.noise(batch, 4, frames, 1, 2, mean=0.0))


def encode_of(frames, batch=1):
    return lambda model: model.encode(cases.noise(batch, 3, frames, 4, 8, mean=0.0))


# Five latents are decoded as 2, 2 and 1. Eight frames are encoded as 1, 4 and 2; the last one is left out.
CALLS = {
    "decode": decode_of(5), "decode-an-image": decode_of(1), "decode-two": decode_of(3, 2),
    "encode": encode_of(8), "encode-an-image": encode_of(1), "encode-two": encode_of(3, 2),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_as_stock(call, launches):
    models = fused, _ = twins()
    parts, reasons = parts_of(fused)
    assert reasons == {}
    assert parts == {
        "ResNet blocks": 13, "upsampling": 2, "downsampling": 2, "encoder": 1, "decoder": 1,
    }  # fmt: skip
    agree(models, call)
    assert "frames" in {name for name, *_ in launches}
    carried_cases.is_stock_after_ejection(models, call)


@pytest.mark.parametrize("call", [CALLS["decode"], CALLS["encode"]], ids=["decode", "encode"])
@each_place
def test_children_are_called_as_in_stock(call, place, launches):
    launches.runs = False  # only the calls are compared
    are_called_as_in_stock(with_random_parameters(build()), inject, call, place)


@pytest.mark.parametrize("call", [CALLS["decode"], CALLS["encode"]], ids=["decode", "encode"])
def test_stocks_padding_activation_and_upsampling_do_not_run(call, monkeypatch):
    fused, _ = twins()
    expected = call(fused)
    for name in "pad", "silu", "interpolate":
        monkeypatch.setattr(torch.nn.functional, name, lambda *a, **o: pytest.fail("stock's code ran"))
    assert torch.equal(call(fused), expected)


def test_in_inference_mode():
    fused, stock = twins()
    with torch.inference_mode():
        agree((fused, stock), decode_of(3))
        agree((fused, stock), encode_of(5))


def test_ejected_as_before():
    carried_cases.ejected_as_before(build())


@pytest.mark.parametrize(
    "layer",
    ["conv_in.conv", "norm_out", "mid.attn_1", "mid.attn_1.norm", "up.1.block.0.conv2.conv",
     "up.1.block.0.swish", "up.2.upsample.conv", "up.1.block.0.nin_shortcut"],
)  # fmt: skip
def test_a_hook_sees_what_it_saw(layer):
    """Beside stock's code for the hooked layer, fused blocks read and leave stock's carried frames."""
    carried_cases.a_hook_sees_what_it_saw(twins(), layer, decode_of(3))


def test_carried_frames_stay():
    carried_cases.carried_frames_stay(twins(), decode_of(5))


def test_convolutions_that_cast(launches):
    fused, stock = carried_cases.casting_twins(build())
    fused_parts, reasons = parts_of(fused)
    assert fused_parts == {}
    [(reason, parts)] = reasons.items()
    assert reason == "it casts its weights at each call"
    assert set(parts) == {"ResNet blocks", "upsampling", "downsampling", "encoder", "decoder"}
    agree((fused, stock), decode_of(2), last_is_fused=False)
    assert "frames" not in {name for name, *_ in launches}


def test_a_run_is_interrupted():
    carried_cases.stops_when_interrupted(twins()[0], decode_of(1))


def test_models_of_other_convolutions_stay_as_they_are():
    """With attention on some level, ComfyUI takes convolutions that carry no frames."""
    model = with_random_parameters(build(attn_resolutions=[32]))
    before = snapshot(model)
    inject(model)
    assert not has_blocks(model)
    assert snapshot(model) == before


def test_time_is_halved_on_each_level():
    models = twins(time_compress=None)
    agree(models, decode_of(3))
    agree(models, encode_of(5))
