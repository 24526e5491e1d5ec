"""Autoencoders whose code keeps frames, masks later ones, or works in tiles: what their plans compute."""

import diffusers
import pytest
import torch

import sdfastgn
from tests.patches import cases, video_cases
from tests.patches.samples import randomize
from tests.patches.video_cases import adapt, codes, decode_of, encode_of, pixels

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

EASYANIMATE = {
    "down_block_types": ("SpatialTemporalDownBlock3D",) * 2,
    "up_block_types": ("SpatialTemporalUpBlock3D",) * 2,
    "block_out_channels": (8, 16),
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
HUNYUAN = {
    "latent_channels": 4,
    "block_out_channels": (16, 16, 32),
    "layers_per_block": 1,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 2,
}
# Name -> (class of diffusers, settings, pixels per latent along each side).
MODELS = {
    "EasyAnimate": ("AutoencoderKLMagvit", EASYANIMATE, 2),
    "EasyAnimate-norms-of-all-frames": (
        "AutoencoderKLMagvit",
        {**EASYANIMATE, "spatial_group_norm": False},
        2,
    ),
    "HunyuanVideo-1.5": ("AutoencoderKLHunyuanVideo15", HUNYUAN, 4),
    "HunyuanImage-refiner": ("AutoencoderKLHunyuanImageRefiner", HUNYUAN, 4),
}


def named(*names):
    return pytest.mark.parametrize(
        "model",
        [
            pytest.param(
                MODELS[name],
                id=name,
                marks=pytest.mark.skipif(
                    not hasattr(diffusers, MODELS[name][0]), reason="a diffusers before this model"
                ),
            )
            for name in names
        ],
    )


each_model = named(*MODELS)
each_with_kept_frames = named("EasyAnimate", "EasyAnimate-norms-of-all-frames")
each_hunyuan = named("HunyuanVideo-1.5", "HunyuanImage-refiner")


def twins(model):
    """(optimized, stock). There are no graphs, because a replay counts as no call of a plan."""
    name, settings, _ = model
    torch.manual_seed(3)
    stock = randomize(getattr(diffusers, name)(**settings)).to(cases.WHERE["device"])
    return cases.twins(stock, cuda_graphs=False)


def is_easyanimate(model):
    return model[0] == "AutoencoderKLMagvit"


def frames_kept(model):
    return {name: m.prev_features for name, m in model.named_modules() if hasattr(m, "prev_features")}


def same(models, call):
    ours, theirs = video_cases.same(models, call)
    assert ours.stride() == theirs.stride()
    assert all(kept is None for kept in frames_kept(models[0]).values())


def calls_of_plans(model):
    """Path of a module -> number of its calls that plans have run. None may have run the model's own code."""
    found = [plans for plans in sdfastgn.report(model).plans if plans.calls or plans.own]
    assert not any(plans.own for plans in found)
    return {plans.path: plans.calls for plans in found}


@pytest.mark.slow
@each_model
@pytest.mark.parametrize("frames", [1, 3])
def test_decode_and_encode(model, frames):
    models = twins(model)
    for seed in range(2):
        same(models, decode_of(codes(frames) + seed))
        same(models, encode_of(pixels(model[2], 4 * frames - 3) - seed))
    batches = frames if is_easyanimate(model) else 1  # of frames, each of which is one call
    assert calls_of_plans(models[0]) == {"encoder": 2 * batches, "decoder": 2 * batches}


@pytest.mark.slow
@each_model
def test_slices_tiles_and_strided_inputs(model):
    models = twins(model)
    sizes = (4, 4, None, 2, 2) if is_easyanimate(model) else (8, 8, 2, 2, 0.5)
    # Stock's attention raises an error on a GPU where a tile is one pixel of one frame.
    frames = 1 if is_easyanimate(model) else 2
    for each in models:
        each.enable_slicing()
        each.enable_tiling(*sizes)
    for _ in range(2):
        same(models, decode_of(codes(frames, batch=2, latents=(3, 1)).mT))
    assert calls_of_plans(models[0]) == {"decoder": 2 * 2 * 3}  # samples and columns
    if "Refiner" not in model[0]:  # upstream's tiles of the refiner's videos are as narrow as latents
        same(models, encode_of(pixels(model[2], 3, latents=(3, 1)).mT))
        assert calls_of_plans(models[0])["encoder"] > 1
    for each in models:
        each.disable_tiling()
    same(models, decode_of(codes(6, latents=(4, 4))[:, :, ::2, ::2, 1::2]))


@pytest.mark.slow
@each_hunyuan
def test_a_batch_of_videos(model):
    """Stock's mask is for one video."""
    models = twins(model)
    call = decode_of(codes(2, batch=2))
    if model is MODELS["HunyuanVideo-1.5"]:
        for each in models:
            with pytest.raises(RuntimeError, match=r"broadcast shape|expanded size"):
                call(each)
    else:
        same(models, call)
    same(models, decode_of(codes(2)))


@pytest.mark.slow
@each_model
def test_calls_leave_nothing_for_the_next_one(model):
    models = twins(model)
    z = codes(2, latents=(1, 2))
    first = models[0].decode(z).sample
    models[0].decode(codes(3, latents=(1, 2)) + 1)
    first.add_(1)  # tiles are blended in place
    same(models, decode_of(z))


# Those of EasyAnimate's decoder, and of the others.
HOOKED = ["mid_block.convs.0.conv1", "up_blocks.0.convs.1.norm1", "up_blocks.0.upsampler"]
OTHERS = ["mid_block.resnets.0.conv1", "mid_block.attentions.0.norm", "up_blocks.1.upsamplers.0.conv.conv"]


@pytest.mark.slow
@each_model
@pytest.mark.parametrize("i", range(3))
def test_a_hook_in_the_model(model, i):
    models = twins(model)
    for each in models:
        each.decode(codes(2, latents=(1, 2)))
        module = each.decoder.get_submodule((HOOKED if is_easyanimate(model) else OTHERS)[i])
        module.register_forward_hook(lambda m, args, y: 2 * y)
    for _ in range(2):
        video_cases.same(models, decode_of(codes(2, latents=(1, 2))))  # its layout is that of a hook's result


@pytest.mark.slow
@each_with_kept_frames
@pytest.mark.parametrize("layer", ["conv_in", "conv_out", "up_blocks.0.upsampler.conv"])
def test_a_hook_that_comes_between_batches_of_frames(model, layer):
    """The model's own code then reads the frames that a plan has kept."""
    models = twins(model)
    for each in models:
        each.decoder(codes(1))
        each.decoder.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    cases.agree(*(each.decoder(codes(1) + 1) for each in models), 5e-5)
    for ours, theirs in zip(*(frames_kept(each).values() for each in models), strict=True):
        assert (ours is None) is (theirs is None)
        if theirs is not None:
            cases.agree(ours, theirs, 5e-5)


@each_with_kept_frames
def test_kept_frames_of_another_size_raise_the_models_error(model):
    for each in twins(model):
        each.decoder(codes(1, latents=(3, 3)))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            each.decoder(codes(1, latents=(3, 2)))


@each_hunyuan
@pytest.mark.parametrize("layer", ["conv_out.conv", "mid_block.attentions.0.to_q"])
def test_a_lora_in_the_model(model, layer):
    """PEFT cannot adapt the convolutions of EasyAnimate."""
    models = twins(model)
    for each in models:
        adapt(each, f"decoder.{layer}", f"encoder.{layer}")
    for _ in range(2):
        same(models, decode_of(codes(2, latents=(1, 2))))
        same(models, encode_of(pixels(model[2], 3, latents=(1, 2))))


@pytest.mark.slow
@each_model
def test_restored_bit_by_bit(model):
    _, stock = twins(model)
    calls = decode_of(codes(2, latents=(1, 2))), encode_of(pixels(model[2], 3, latents=(1, 2)))
    video_cases.is_restored_bit_by_bit(stock, *calls)


@pytest.mark.gpu
@each_model
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(model, dtype):
    models = [each.to(dtype) for each in twins(model)]
    large = {"latents": (17, 23)}
    calls = [(decode_of, codes(3, **large)), (encode_of, pixels(model[2], 9, **large))]
    video_cases.is_no_less_exact(models, *calls)
