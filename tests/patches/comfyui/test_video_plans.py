"""ComfyUI's autoencoders for videos run as plans, in chunks that keep frames for the next one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.patches import cases
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import comfy.ops  # noqa: E402
import comfy.sd  # noqa: E402
from comfy import model_management  # noqa: E402
from comfy.ldm.hunyuan_video import vae_refiner  # noqa: E402
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine  # noqa: E402
from comfy.ldm.wan import vae, vae2_2  # noqa: E402

from scripts.publish.comfyui_models import random_weights  # noqa: E402
from sdfastgn.patches.comfyui.inject import has_blocks, root_of  # noqa: E402
from sdfastgn.plans import install as planning  # noqa: E402
from sdfastgn.plans.comfyui import TRUSTED, optimize_vae, text_of  # noqa: E402
from sdfastgn.plans.forward import PlannedForward  # noqa: E402
from tests.patches.comfyui.comfy_models import snapshot, with_random_parameters  # noqa: E402

pytestmark = [
    pytest.mark.fused_on_cpu,
    pytest.mark.usefixtures("attention_of_pytorch", "on_each_device", "without_gradients"),
]


def wan():
    sizes = {"dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
    return vae.WanVAE(**sizes, temperal_downsample=[True, True])


def wan_22():
    sizes = {"dim": 8, "dec_dim": 12, "z_dim": 4, "dim_mult": [2, 2], "num_res_blocks": 1}
    return vae2_2.WanVAE(**sizes, temperal_downsample=[True])


def hunyuan_video(**options):
    """As ``comfy/sd.py`` builds it, with fewer channels. It resamples space alone, and space and time."""
    sizes = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
        "ch_mult": [1, 1, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0, "conv3d": True,
        "time_compress": 2, **options,
    }  # fmt: skip
    return AutoencoderKL(ddconfig=sizes, embed_dim=4)


def hunyuan_video_15(regularizer="EmptyRegularizer", **options):
    """It resamples space alone, and space and time. HunyuanImage's refiner has the same blocks."""
    sizes = {
        "block_out_channels": [8, 16, 16], "in_channels": 3, "out_channels": 3, "num_res_blocks": 1,
        "ffactor_spatial": 4, "ffactor_temporal": 2, "downsample_match_channel": True,
        "upsample_match_channel": True, "z_channels": 4, **options,
    }  # fmt: skip
    return AutoencodingEngine(
        regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
        encoder_config={"target": f"{vae_refiner.__name__}.Encoder", "params": sizes},
        decoder_config={"target": f"{vae_refiner.__name__}.Decoder", "params": sizes},
    )


# Each call of the encoder or decoder of these is one chunk, which keeps frames in ``feat_cache``.
WITH_CACHES = [wan, wan_22]
# One call computes all chunks.
WHOLE = [hunyuan_video, hunyuan_video_15]
each_family = pytest.mark.parametrize("build", WITH_CACHES + WHOLE)
with_caches = pytest.mark.parametrize("build", WITH_CACHES)


def decode(frames, batch=1):
    return lambda model, seed=0: model.decode(cases.noise(batch, 4, frames, 2, 3, mean=0.0, seed=seed))


def encode(frames, batch=1):
    return lambda model, seed=0: model.encode(cases.noise(batch, 3, frames, 8, 12, mean=0.0, seed=seed))


# The last chunk of a decode of five latents, and of an encode of ten frames, is shorter than those before.
CALLS = {
    "decode": decode(5), "decode-an-image": decode(1), "decode-two": decode(3, 2), "encode": encode(10),
    "encode-an-image": encode(1), "encode-two": encode(5, 2),
}  # fmt: skip
a_decode_and_an_encode = pytest.mark.parametrize(
    "call", [CALLS["decode"], CALLS["encode"]], ids=["decode", "encode"]
)


def planned_and_stock(model):
    stock = with_random_parameters(model.eval())
    ours = copy.deepcopy(stock)
    planning.install(ours, True, TRUSTED)
    return ours, stock


def planned(model):
    """What ran calls of ``model`` and of the modules in it."""
    found = [each for module in model.modules() for each in PlannedForward.all_of(module)]
    return [each for each in found if each.calls or each.own]


def close(a, b):
    """In fp32 cuDNN computes some convolutions with less digits than the CPU."""
    assert b.std() > 1e-2
    assert a.is_contiguous() or not b.is_contiguous()
    assert (a - b).abs().max() < (1e-5 if a.is_cpu else 1e-4) * b.abs().max()


def agree(models, call, *, calls=2):
    """The results agree, for other numbers than those of the trace too."""
    ours, stock = models
    with torch.inference_mode():
        for seed in range(calls):
            close(call(ours, seed), call(stock, seed))


@each_family
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_as_stock(build, call):
    models = ours, _ = planned_and_stock(build())
    agree(models, call, calls=3)
    (half,) = planned(ours)
    assert half.own == {}
    # No norm of a convolution's input runs by itself, only attention's. Wan's first chunk has no pads.
    for plan in half.plans[build in WITH_CACHES :]:
        names = [step.target for step in plan.steps]
        norms = names.count("channel_norm") + names.count("group_norm")
        assert norms == names.count("attention") < names.count("frames")
        assert "copy" not in names or build in WITH_CACHES


@with_caches
def test_the_chunks_of_longer_videos_are_of_few_kinds(build):
    ours, _ = planned_and_stock(build())
    with torch.inference_mode():
        decode(9)(ours)
        encode(33)(ours)
    assert [each.own for each in planned(ours)] == [{}, {}]
    assert max(each.traces for each in planned(ours)) <= 10


@with_caches
@a_decode_and_an_encode
def test_the_cache_is_stocks_after_each_chunk(build, call):
    models = planned_and_stock(build())
    entries = [], []
    for model, found in zip(models, entries, strict=True):
        for half in model.encoder, model.decoder:
            half.register_forward_hook(
                lambda m, args, options, y, found=found: found.append(copy.copy(options["feat_cache"])),
                with_kwargs=True,
            )
    agree(models, call)
    ours, theirs = entries
    assert len(ours) == len(theirs) > 2
    for a, b in zip(ours, theirs, strict=True):
        assert [type(t) for t in a] == [type(t) for t in b]
        for x, y in zip(a, b, strict=True):
            if isinstance(x, torch.Tensor):
                cases.agree(x, y, 1e-4)
            else:
                assert x == y


@with_caches
def test_plans_from_the_second_chunk_on(build):
    ours, stock = planned_and_stock(build())
    z = cases.noise(1, 4, 2, 2, 3, mean=0.0).split(1, 2)
    found = []
    for second in ours, stock:
        caches = [None] * 64
        for model, part in zip((stock, second), z, strict=True):
            result = model.decoder(part, feat_cache=caches, feat_idx=[0])
        found.append(torch.cat(result, 2) if isinstance(result, list) else result)
    close(*found)
    assert [(each.calls, each.own) for each in planned(ours)] == [(1, {})]


@each_family
@a_decode_and_an_encode
def test_convolutions_that_cast(build, call):
    """ComfyUI converts the weights in each call."""
    stock = with_random_parameters(build().eval()).half()
    for layer in stock.modules():
        if hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = True
    ours = copy.deepcopy(stock)
    planning.install(ours, True, TRUSTED)
    agree((ours, stock), call)
    assert [each.own for each in planned(ours)] == [{}]


@each_family
def test_functions_on_weights(build):
    """ComfyUI puts them there for LoRAs with little memory."""
    models = planned_and_stock(build())
    for model in models:
        convs = [m for m in model.decoder.modules() if isinstance(m, nn.Conv3d)]
        convs[2].weight_function = [lambda weight: weight * 1.5]
    agree(models, decode(3))


@each_family
def test_a_hook_sees_what_it_saw(build):
    models = planned_and_stock(build())
    seen = [], []
    for model, found in zip(models, seen, strict=True):
        convs = [m for m in model.decoder.modules() if isinstance(m, nn.Conv3d)]
        convs[3].register_forward_hook(lambda m, args, y, found=found: found.append(y.clone()))
    with torch.inference_mode():
        ours, theirs = (decode(3)(model) for model in models)
    cases.agree(ours, theirs, 1e-4)
    for a, b in zip(*seen, strict=True):
        cases.agree(a, b, 1e-4)


@each_family
def test_the_fault_of_cudnn_is_avoided(build, monkeypatch):
    """ComfyUI calls cuDNN itself where PyTorch would not call it for a 3-D convolution."""
    called = []

    def cudnn_convolution(x, weight, padding, stride, dilation, groups, **_):
        called.append(weight.shape)
        return torch.conv3d(x, weight, None, stride, padding, dilation, groups)

    monkeypatch.setattr(comfy.ops, "NVIDIA_MEMORY_CONV_BUG_WORKAROUND", True)
    monkeypatch.setattr(torch, "cudnn_convolution", cudnn_convolution)
    monkeypatch.setattr(F, "conv3d", lambda *a, **o: pytest.fail("PyTorch's convolution ran"))
    ours, _ = planned_and_stock(build())
    ours.bfloat16().decode(cases.noise(1, 4, 2, 2, 3, mean=0.0, dtype=torch.bfloat16))
    assert called


@pytest.mark.parametrize("build", [*WITH_CACHES, hunyuan_video])
def test_a_run_is_interrupted(build):
    """A layer before the decoder runs stock's code."""
    ours, _ = planned_and_stock(build())
    for is_traced in False, True:
        if is_traced:
            decode(1)(ours)
        model_management.interrupt_current_processing()
        with pytest.raises(model_management.InterruptProcessingException):
            decode(1)(ours)
    assert not model_management.processing_interrupted()


def test_another_number_of_cached_frames(monkeypatch):
    monkeypatch.setattr(vae, "CACHE_T", 3)
    models = planned_and_stock(wan())
    agree(models, decode(5))
    agree(models, encode(9))


@pytest.mark.parametrize(
    "options",
    [{"attn_resolutions": [32]}, {"time_compress": None}],
    ids=["convolutions that carry no frames", "time on each level"],
)
def test_other_kinds_of_hunyuan_video(options):
    models = planned_and_stock(hunyuan_video(**options))
    agree(models, decode(3))
    agree(models, encode(5))


@pytest.mark.parametrize(
    "options",
    [{"upsample_match_channel": False, "downsample_match_channel": False},
     {"regularizer": "DiagonalGaussianRegularizer"}],
    ids=["resampling that keeps the number of channels", "the mean of the refiner's latents"],
)  # fmt: skip
def test_other_kinds_of_hunyuan_video_15(options):
    models = planned_and_stock(hunyuan_video_15(**options))
    agree(models, decode(3))
    agree(models, encode(5))


def test_a_decoder_of_group_norms():
    models = planned_and_stock(vae_refiner.Decoder(4, 3, [32, 64], 1, 2, 1, refiner_vae=False))
    agree(models, lambda model, seed: model(cases.noise(1, 4, 3, 2, 3, mean=0.0, seed=seed)))


# --- ComfyUI's own VAE ------------------------------------------------------------------


@pytest.fixture
def loaded(gpu_at_hand):
    """ComfyUI's VAE from the weights of a small model. Its number of layers is fixed, not its channels."""
    if cases.WHERE["device"] != "cpu":
        pytest.skip("ComfyUI was started for a CPU")
    sizes = {"dim": 8, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    with torch.device("meta"):
        model = vae.WanVAE(**sizes, temperal_downsample=[False, True, True])
    yield comfy.sd.VAE(sd=random_weights(model, torch.float32, "cpu"))
    model_management.unload_all_models()


def latent(frames=2, size=1, seed=1):
    return torch.randn(1, 16, frames, size, size, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_from_a_vae_to_the_frames(loaded):
    optimized = optimize_vae(loaded)
    expected = [loaded.decode(latent(seed=seed)) for seed in range(3)]
    before = snapshot(loaded.first_stage_model)
    for seed in range(3):
        close(optimized.decode(latent(seed=seed)), expected[seed])
    (decoder,) = planned(optimized.first_stage_model)
    assert (decoder.calls, decoder.own) == (6, {})
    text = text_of(optimized.patcher)
    assert text.startswith("WanVAE: faster, once its calls repeat. They run as plans\ndecoder: 6 calls")
    # The VAE that came in is stock's, also right after the other one ran.
    assert torch.equal(loaded.decode(latent(seed=0)), expected[0])
    assert snapshot(loaded.first_stage_model) == before
    assert not has_blocks(root_of(loaded.patcher))


@torch.inference_mode()
def test_tiles(loaded):
    """Tiles at the edges have other sizes."""
    tiles = {"tile_x": 3, "tile_y": 3, "overlap": 1}
    expected = [loaded.decode_tiled(latent(3, 4, seed), **tiles) for seed in range(2)]
    optimized = optimize_vae(loaded)
    for seed in range(2):
        close(optimized.decode_tiled(latent(3, 4, seed), **tiles), expected[seed])
    (decoder,) = planned(optimized.first_stage_model)
    assert (decoder.calls, decoder.traces, decoder.own) == (16, 8, {})
