"""ComfyUI's autoencoders of HunyuanVideo 1.5 and HunyuanImage's refiner, in chunks and in one."""

import pytest

from tests.patches import cases
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from comfy.ldm.hunyuan_video import vae_refiner  # noqa: E402
from comfy.ldm.models.autoencoder import AutoencodingEngine  # noqa: E402
from comfy.ldm.modules.diffusionmodules import model as comfy_model  # noqa: E402

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
KIND = "comfy.ldm.hunyuan_video.vae_refiner"


def build(regularizer="EmptyRegularizer", **options):
    """Two resamplings: one of space alone, and one of time too."""
    sizes = {
        "block_out_channels": [8, 16, 16], "in_channels": 3, "out_channels": 3, "num_res_blocks": 1,
        "ffactor_spatial": 4, "ffactor_temporal": 2, "downsample_match_channel": True,
        "upsample_match_channel": True, "z_channels": 4, **options,
    }  # fmt: skip
    return AutoencodingEngine(
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
        encoder_config={"target": f"{KIND}.Encoder", "params": sizes},
        decoder_config={"target": f"{KIND}.Decoder", "params": sizes},
    )


def twins(**options):
    return carried_cases.twins(build(**options))


def decode_of(frames, batch=1):
    return lambda model: model.decode(cases.noise(batch, 4, frames, 2, 3, mean=0.0))


def encode_of(frames, batch=1):
    return lambda model: model.encode(cases.noise(batch, 3, frames, 8, 12, mean=0.0))


# Five latents are decoded as 2, 2 and 1. Ten frames are encoded as 1, 4 and 4; the last frame is left out.
CALLS = {
    "decode": decode_of(5), "decode-an-image": decode_of(1), "decode-two": decode_of(3, 2),
    "encode": encode_of(10), "encode-an-image": encode_of(1), "encode-two": encode_of(5, 2),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_as_stock(call, launches):
    models = fused, _ = twins()
    assert not parts_of(fused)[1]
    agree(models, call)
    names = [name for name, *_ in launches]
    # No norm of a convolution's input runs by itself: only attention's.
    assert names.count("channel_norm") == 1 < names.count("frames")
    carried_cases.is_stock_after_ejection(models, call)


@pytest.mark.parametrize("call", [CALLS["decode"], CALLS["encode"]], ids=["decode", "encode"])
@each_place
def test_children_are_called_as_in_stock(call, place, launches):
    launches.runs = False  # only the calls are compared
    are_called_as_in_stock(with_random_parameters(build()), inject, call, place)


def test_resampling_that_keeps_the_number_of_channels():
    models = twins(upsample_match_channel=False, downsample_match_channel=False)
    agree(models, decode_of(3))
    agree(models, encode_of(3))


def test_the_mean_of_the_refiners_latents():
    agree(twins(regularizer="DiagonalGaussianRegularizer"), encode_of(3))


def test_ejected_as_before():
    carried_cases.ejected_as_before(build())


@pytest.mark.parametrize(
    "layer",
    ["conv_in", "conv_in.conv", "norm_out", "conv_out.conv", "mid.block_1.conv1", "mid.block_1.norm2",
     "mid.attn_1.q", "mid.attn_1.norm", "up.1.block.0.conv2.conv", "up.1.block.0.swish",
     "up.0.upsample.conv", "up.2.block.0.nin_shortcut"],
)  # fmt: skip
def test_a_hook_sees_what_it_saw(layer):
    """Beside stock's code for the hooked layer, fused blocks read and leave stock's carried frames."""
    carried_cases.a_hook_sees_what_it_saw(twins(upsample_match_channel=False), layer, decode_of(3))


def test_carried_frames_stay():
    carried_cases.carried_frames_stay(twins(), decode_of(5))


def test_convolutions_that_cast(launches):
    fused, stock = carried_cases.casting_twins(build())
    fused_parts, reasons = parts_of(fused)
    assert set(fused_parts) == {"norms"}
    [(reason, parts)] = reasons.items()
    assert reason == "it casts its weights at each call"
    assert set(parts) == {"ResNet blocks", "attention", "upsampling", "downsampling", "encoder", "decoder"}
    agree((fused, stock), decode_of(2), last_is_fused=False)
    assert "frames" not in {name for name, *_ in launches}


def test_a_run_is_interrupted():
    carried_cases.stops_when_interrupted(twins()[0], decode_of(1))


def test_models_of_other_convolutions_stay_as_they_are():
    """In channels-last PyTorch repeats the border of a video slowly."""
    block = comfy_model.ResnetBlock(in_channels=32, temb_channels=0, conv_op=comfy_model.VideoConv3d)
    models = block, vae_refiner.Decoder(4, 3, [32, 64], 1, 2, 1, refiner_vae=False)
    for model in models:
        before = snapshot(with_random_parameters(model))
        inject(model)
        assert not has_blocks(model)
        assert snapshot(model) == before
