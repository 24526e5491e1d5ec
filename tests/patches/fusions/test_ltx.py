"""The fused autoencoders of LTX-Video and LTX-2: whole ones, and their blocks."""

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import ltx as fusion
from tests.patches import cases
from tests.patches.samples import randomize
from tests.patches.video_cases import (
    adapt,
    codes,
    drop_all,
    encode_of,
    hooks_see_the_same,
    is_no_less_exact,
    is_restored_bit_by_bit,
    recorded,
    same,
    video,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

SIZES = {
    "latent_channels": 4,
    "block_out_channels": (8, 8, 16, 16),
    "decoder_block_out_channels": (8, 8, 16, 16),
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 5,
    "spatio_temporal_scaling": (True, True, False, False),
    "decoder_spatio_temporal_scaling": (True, True, False, False),
    "patch_size": 2,
}
# As from LTX-Video 0.9.1 on.
LATER = {
    "timestep_conditioning": True,
    "decoder_block_out_channels": (8, 16),
    "decoder_layers_per_block": (1,) * 3,
    "decoder_spatio_temporal_scaling": (True,) * 2,
    "upsample_factor": (2, 2),
    "upsample_residual": (True, False),
}
SECOND = {
    "latent_channels": 4,
    "block_out_channels": (8, 8, 16, 16),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 4,
    "patch_size": 2,
}


def first(**options):
    return AutoencoderKLLTXVideo(**{**SIZES, **options})


def conditioned(**options):
    return AutoencoderKLLTXVideo(**{**SIZES, **LATER, **options})


def second(**options):
    return fusion.ltx2.AutoencoderKLLTX2Video(**SECOND, **options)


FAMILIES = [
    pytest.param(first, id="ltx"),
    pytest.param(conditioned, id="ltx-conditioned"),
    pytest.param(second, id="ltx-2",
                 marks=pytest.mark.skipif(fusion.ltx2 is None, reason="a diffusers before LTX-2")),
]  # fmt: skip
each_family = pytest.mark.parametrize("build", FAMILIES)


def twins(build, dtype=torch.float32, **options):
    """(fused, stock)"""
    return cases.twins(randomize(build(**options)).to(cases.WHERE["device"], dtype))


def decode_of(z, seed=0, **options):
    def decode(model):
        conditions = getattr(model.config, "timestep_conditioning", False)
        temb = torch.linspace(0.05, 0.2, len(z)).to(z) if conditions else None
        torch.manual_seed(seed)
        return model.decode(z, temb, **options).sample

    return decode


def pixels(model, frames, batch=1):
    side = model.spatial_compression_ratio
    return cases.noise(batch, 3, frames, side, 2 * side, mean=0.0)


@pytest.fixture
def convolutions(monkeypatch):
    """A list of the convolutions that run fused."""
    return recorded(monkeypatch, fusion, "_convolve")


def stock_class(model, name):
    module = fusion.ltx2 if "LTX2" in type(model).__name__ else fusion.ltx
    return getattr(module, ("LTX2Video" if module is fusion.ltx2 else "LTXVideo") + name)


# --- whole models -------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("frames", [1, 3])
def test_decode_and_encode(build, frames, convolutions, launches):
    models = twins(build)
    sdfastgn.optimize(models[0], cuda_graphs=False)  # the rehearsal of a graph would launch too
    assert not sdfastgn.report(models[0]).skipped
    convs = [m for m in models[0].decoder.modules() if isinstance(m, stock_class(models[0], "CausalConv3d"))]
    same(models, decode_of(codes(frames)))
    assert set(convolutions) == set(convs)
    # One pass for each convolution but the products of shortcuts.
    padded = [conv for conv in convs if conv.kernel_size != (1, 1, 1)]
    assert [name for name, *_ in launches].count("frames") == len(padded)
    same(models, encode_of(pixels(models[0], 8 * frames - 7)))


@each_family
def test_norms_of_an_encoder_run_in_kernels(build, monkeypatch):
    fused, _ = twins(build)
    kinds = {type(module) for module in fused.modules() if type(module).__name__.endswith("RMSNorm")}
    called = []
    for kind in kinds:
        recorded(monkeypatch, kind, "forward", called)
    encode_of(pixels(fused, 9))(fused)
    assert kinds
    assert not called


@each_family
def test_causal_decoders(build):
    if build is second:
        same(twins(build), decode_of(codes(2), causal=True))
    else:
        same(twins(build, decoder_causal=True), decode_of(codes(2)))


@each_family
def test_a_batch_in_slices_and_tiles(build):
    models = twins(build)
    z = codes(2, batch=2, latents=(4, 2))
    same(models, decode_of(z[..., :2, :]))
    side = models[0].spatial_compression_ratio
    for model in models:
        model.enable_tiling(3 * side, 3 * side, None, 2 * side, 2 * side)
    same(models, decode_of(z[:1]))
    for model in models:
        model.use_slicing = build is not conditioned  # upstream cannot slice with timesteps that are given
    same(models, decode_of(z[..., :2, :]))


@each_family
def test_frames_in_tiles(build):
    models = twins(build)
    for model in models:
        model.use_framewise_decoding = True
        ratio = model.temporal_compression_ratio
        model.tile_sample_min_num_frames, model.tile_sample_stride_num_frames = 2 * ratio, ratio
    same(models, decode_of(codes(4, latents=(2, 2))))


def test_injected_noise():
    models = twins(conditioned, decoder_inject_noise=(True, False, True))
    same(models, decode_of(codes(2)))


@each_family
def test_strided_input(build):
    models = twins(build)
    same(models, decode_of(codes(4, latents=(4, 4))[:, :, ::2, ::2, 1::2]))
    same(models, encode_of(pixels(models[0], 9).mT))


@each_family
def test_restored_bit_by_bit(build):
    stock = randomize(build()).to(cases.WHERE["device"])
    is_restored_bit_by_bit(stock, decode_of(codes(2, latents=(2, 2))), encode_of(pixels(stock, 9)))


HOOKED = ["conv_in", "mid_block.resnets.0.conv1", "mid_block.resnets.0.norm2", "conv_out.conv", "norm_out",
          "up_blocks.0.upsamplers.0.conv", "mid_block.resnets.0"]  # fmt: skip


@each_family
@pytest.mark.parametrize("layer", HOOKED)
def test_a_hook_within_a_decoder(build, layer):
    models = twins(build, **({"decoder_spatio_temporal_scaling": (True,) * 4} if build is first else {}))
    for model in models:
        model.decoder.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    same(models, decode_of(codes(1, latents=(2, 2))))


@each_family
@pytest.mark.parametrize("layer", ["conv_in", "norm_out", "conv_act", "conv_out.conv"])
def test_a_hook_within_an_encoder(build, layer):
    models = twins(build)
    for model in models:
        model.encoder.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    same(models, encode_of(pixels(models[0], 1)))


@each_family
def test_a_lora_within_a_model(build):
    models = twins(build)
    for model in models:
        adapt(model, *(f"{part}.conv_{end}.conv" for part in ("encoder", "decoder") for end in ("in", "out")))
    same(models, decode_of(codes(1, latents=(2, 2))))
    same(models, encode_of(pixels(models[0], 1)))


# --- blocks ---------------------------------------------------------------------------


def block(**options):
    return randomize(fusion.ltx.LTXVideoResnetBlock3d(6, 10, **options)).to(cases.WHERE["device"])


@pytest.mark.parametrize(
    "options", [{}, {"residual": True}, {"residual": True, "upscale_factor": 2}], ids=str
)
@pytest.mark.parametrize("stride", [(2, 2, 2), (1, 2, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("frames", [1, 3])
def test_upsampling(frames, stride, options):
    if options.get("upscale_factor") and stride == (2, 1, 1):
        stride = (2, 1, 2)
    module = randomize(fusion.ltx.LTXVideoUpsampler3d(8, stride, **options)).to(cases.WHERE["device"])
    models = cases.twins(module)
    x = video(2, 8, frames, 4, 3)
    cases.agree(*(model(x) for model in models))
    cases.agree(*(model(x.contiguous()) for model in models))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"kernel_size": 1}, {"kernel_size": 5}], ids=str)
def test_convolutions(options, mode, is_causal, convolutions):
    conv = fusion.ltx.LTXVideoCausalConv3d(
        6, 10, padding_mode=mode, is_causal=is_causal, **{"kernel_size": 3, **options}
    )
    models = cases.twins(randomize(conv).to(cases.WHERE["device"]))
    for x in (video(2, 6, 5, 5, 6), video(2, 6, 5, 5, 6).contiguous()):
        cases.agree(*(model(x) for model in models))
    assert len(convolutions) == (0 if mode == "circular" else 2)


PARTS = [
    "norm1",
    "norm2",
    "nonlinearity",
    "conv1",
    "conv1.conv",
    "conv2",
    "norm3",
    "conv_shortcut",
    "dropout",
]


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_a_layer_sees_what_it_saw(name):
    models = cases.twins(block())
    x = video(1, 6, 3, 3, 4)
    hooks_see_the_same(models, name, lambda: cases.agree(*(m(x) for m in models)))


CHANGES = {
    "a-replaced-conv-forward": lambda m: setattr(
        m.conv1.conv, "_conv_forward", lambda x, w, b: nn.functional.conv3d(x, 2 * w, b, padding=(0, 1, 1))
    ),
    "another-norm": lambda m: setattr(m, "norm1", nn.Identity()),
    "a-norm-with-weights": lambda m: setattr(m, "norm1", fusion.RMSNorm(6, 1e-2)),
    "another-eps": lambda m: setattr(m.norm1, "eps", 0.5),
    "another-activation": lambda m: setattr(m, "nonlinearity", nn.Tanh()),
    "dropout": drop_all,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_layers_run_stocks_code(change):
    models = cases.twins(block())
    for model in models:
        change(model)
        model.to(cases.WHERE["device"])
    cases.agree(*(model(video(1, 6, 3, 3, 4)) for model in models))


def test_gradients_are_stocks(convolutions):
    cases.same_gradients(cases.twins(block()), video(1, 6, 2, 3, 4))
    assert not convolutions


@each_family
def test_gradient_checkpointing(build):
    found = []
    for model in twins(build):
        model.enable_gradient_checkpointing()
        x = pixels(model, 9).requires_grad_()
        with torch.enable_grad():
            y = encode_of(x)(model.train())
            found.append((y.detach(), *torch.autograd.grad(y.square().mean(), x)))
    for ours, theirs in zip(*found, strict=True):
        cases.agree(ours, theirs)


def test_autocast_runs_stocks_code(convolutions):
    models = cases.twins(block())
    with torch.autocast(cases.WHERE["device"], torch.bfloat16):
        found = [model(video(1, 6, 2, 3, 4)) for model in models]
    assert not convolutions
    cases.agree(*found, bound=3e-2)


def test_under_a_compiler_the_graph_is_diffusers_own():
    cases.compiles_to_stocks_graph(cases.twins(block()), lambda m: m(video(1, 6, 2, 3, 4)))


# --- numbers --------------------------------------------------------------------------


@pytest.mark.gpu
@each_family
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(build, dtype):
    models = twins(build, dtype)
    x = pixels(models[1], 17)
    is_no_less_exact(models, (decode_of, codes(3, latents=(17, 23))), (encode_of, x))
