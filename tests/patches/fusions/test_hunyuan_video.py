"""The fused autoencoder of HunyuanVideo: whole ones, in tiles and slices, and its blocks one by one."""

from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo
from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as stock_file
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import hunyuan_video as fusion
from sdfastgn.patches.fusions import wrapped_conv
from tests.patches import cases, samples, video_cases
from tests.patches.samples import randomize, snapshot
from tests.patches.video_cases import (
    codes,
    decode_of,
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
    "block_out_channels": (8, 8, 16, 16),
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
}


def autoencoder():
    return randomize(AutoencoderKLHunyuanVideo(**SIZES))


def twins(dtype=torch.float32):
    """(fused, stock). There are no graphs, because the rehearsal of a graph launches kernels, too."""
    return cases.twins(autoencoder().to(cases.WHERE["device"], dtype), cuda_graphs=False)


pixels = partial(video_cases.pixels, 8)


@pytest.fixture
def convolutions(monkeypatch):
    """A list of the convolutions that run fused."""
    found = recorded(monkeypatch, fusion, "convolve")
    return recorded(monkeypatch, wrapped_conv, "convolve", found)


@pytest.fixture
def no_padding(monkeypatch):
    """Stock's padding must not run."""
    pad = nn.functional.pad

    def guarded(x, *args, mode="constant", **options):
        assert mode != "replicate"
        return pad(x, *args, mode=mode, **options)

    return lambda: monkeypatch.setattr(stock_file.F, "pad", guarded)


# --- whole models -------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_decode(frames, launches, no_padding):
    models = twins()
    assert not sdfastgn.report(models[0]).skipped
    z = codes(frames)
    expected = models[1].decode(z).sample
    no_padding()
    found = models[0].decode(z).sample
    cases.agree(found, expected, 5e-5)
    assert found.stride() == expected.stride()
    names = [name for name, *_ in launches]
    convs = [m for m in models[0].decoder.modules() if isinstance(m, stock_file.HunyuanVideoCausalConv3d)]
    padded = [conv for conv in convs if conv.conv.kernel_size != (1, 1, 1)]
    assert names.count("frames") == len(padded)
    # The only norm with a pass of its own is attention's.
    assert names.count("apply") + names.count("small") == 1


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_encode(frames):
    same(twins(), encode_of(pixels(frames)))


@pytest.mark.parametrize("latents", [(3, 1), (1, 1)], ids=str)
def test_odd_sizes(latents):
    models = twins()
    same(models, decode_of(codes(2, latents=latents)))
    x = pixels(5, latents=latents)
    same(models, encode_of(x[..., : x.shape[-2] - 3, : x.shape[-1] - 5]))


def test_a_batch():
    models = twins()
    same(models, decode_of(codes(2, batch=2, latents=(1, 2))))
    same(models, encode_of(pixels(5, batch=2, latents=(1, 2))))


def tile(model):
    model.enable_tiling(
        tile_sample_min_height=16,
        tile_sample_min_width=16,
        tile_sample_min_num_frames=4,
        tile_sample_stride_height=8,
        tile_sample_stride_width=8,
        tile_sample_stride_num_frames=4,
    )


def test_slices_and_tiles(convolutions):
    models = twins()
    for model in models:
        model.enable_slicing()
        tile(model)

    def firsts():
        return sum(conv is models[0].decoder.conv_in for conv in convolutions)

    # Samples, then tiles of rows and of columns.
    same(models, decode_of(codes(1, batch=2, latents=(1, 1))))
    assert firsts() == 2
    same(models, decode_of(codes(1, latents=(2, 3))))
    assert firsts() == 2 + 2 * 3
    same(models, encode_of(pixels(1, latents=(1, 3))))


@pytest.mark.parametrize("framewise", [False, True])
def test_frames_in_tiles(framewise, convolutions):
    models = twins()
    for model in models:
        model.tile_sample_min_num_frames, model.tile_sample_stride_num_frames = 8, 4
        model.use_framewise_decoding = model.use_framewise_encoding = framewise
    same(models, decode_of(codes(4, latents=(1, 1))))
    firsts = [conv for conv in convolutions if conv is models[0].decoder.conv_in]
    assert len(firsts) == (4 if framewise else 1)
    same(models, encode_of(pixels(13, latents=(1, 1))))


def test_calls_leave_nothing_for_the_next_one():
    fused, _ = twins()
    z = codes(2, latents=(1, 2))
    first = fused.decode(z).sample
    kept = first.clone()
    fused.decode(codes(3, latents=(1, 2)) + 1)
    first.add_(1)  # tiles are blended in place
    assert torch.equal(fused.decode(z).sample, kept)


def test_restored_bit_by_bit():
    stock = autoencoder().to(cases.WHERE["device"])
    is_restored_bit_by_bit(stock, decode_of(codes(2, latents=(1, 2))), encode_of(pixels(5, latents=(1, 2))))


@pytest.mark.parametrize("pays", [False, True])
def test_statistics_of_the_kernel_before(pays, monkeypatch, launches):
    """Where they pay, a norm after a sum or a bias reads no more than the sum's statistics."""
    monkeypatch.setattr("sdfastgn.patches.core.statistics.statistics_pay", lambda C, HW: pays)
    models = twins()
    same(models, decode_of(codes(2, latents=(1, 2))))
    read = cases.passes(launches)["statistics"]
    blocks = [
        m for m in models[0].decoder.modules() if isinstance(m, stock_file.HunyuanVideoResnetBlockCausal3D)
    ]
    # Always read: each block's second norm, and attention's and the next one's input.
    always = len(blocks) + 1
    assert read == (always if pays else 2 * len(blocks) + 1)


# --- when it is left alone ------------------------------------------------------------

LEFT = "its model is faster as it is: PyTorch repeats the border of a video slowly in channels-last"


def test_a_convolution_that_cannot_be_fused_leaves_the_model():
    model = autoencoder()
    model.decoder.conv_in.forward = lambda x: x
    report = sdfastgn.report(sdfastgn.optimize(model))
    assert not report.fused
    assert report.channels_last_weights == 0
    reasons = {e.path: e.reason for e in report.skipped}
    assert reasons.pop("decoder.conv_in") == "other code replaced this instance's forward"
    assert set(reasons.values()) == {LEFT}
    (graphs,) = report.graphs
    assert graphs.eager == {LEFT: 0}


def test_an_unknown_release_leaves_the_model(monkeypatch):
    samples.make_unknown(monkeypatch, "HunyuanVideoCausalConv3d.forward")
    model = autoencoder()
    before = snapshot(model)
    report = sdfastgn.report(sdfastgn.optimize(model))
    assert not report.fused
    unknown = (
        "HunyuanVideoCausalConv3d.forward of this diffusers is not a version that sdfastgn was tested with"
    )
    assert {e.reason for e in report.skipped} == {LEFT, unknown}
    assert snapshot(model) == before


def test_an_activation_without_a_fused_form_is_skipped():
    block = stock_file.HunyuanVideoResnetBlockCausal3D(8, groups=4)
    block.nonlinearity = nn.Tanh()
    model = sdfastgn.optimize(block)
    (skipped,) = sdfastgn.report(model).skipped
    assert skipped.reason == "activation Tanh has no fused form"
    assert {e.fusion for e in sdfastgn.report(model).fused} == {"group_norm", "hunyuan_video_conv"}


# --- blocks ---------------------------------------------------------------------------


def block(C_in=6, C_out=10):
    module = stock_file.HunyuanVideoResnetBlockCausal3D(C_in, C_out, groups=2)
    return randomize(module).to(cases.WHERE["device"])


def test_a_block_is_three_convolutions(convolutions):
    fused, _ = cases.twins(block())
    fused(video(1, 6, 2, 3, 4))
    assert convolutions == [fused.conv1, fused.conv2, fused.conv_shortcut]


CONVOLUTIONS = [
    {},
    {"stride": 2},
    {"stride": (1, 2, 2), "padding": 1},
    {"bias": False},
    {"kernel_size": 5, "dilation": 2},
    {"kernel_size": 1},
]


@pytest.mark.parametrize("pad_mode", ["replicate", "constant", "reflect"])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions(options, pad_mode, convolutions):
    conv = stock_file.HunyuanVideoCausalConv3d(6, 10, pad_mode=pad_mode, **options)
    models = cases.twins(randomize(conv).to(cases.WHERE["device"]))
    for x in (video(2, 6, 5, 5, 6), video(2, 6, 5, 5, 6).contiguous()):
        fused, stock = (model(x) for model in models)
        cases.agree(fused, stock)
    assert len(convolutions) == (0 if pad_mode == "reflect" else 2)


@pytest.mark.parametrize("factor", [(2, 2, 2), (1, 2, 2), (2, 1, 1), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_upsampling(frames, factor, convolutions):
    module = stock_file.HunyuanVideoUpsampleCausal3D(6, 10, upsample_factor=factor)
    models = cases.twins(randomize(module).to(cases.WHERE["device"]))
    x = video(2, 6, frames, 3, 4)
    cases.agree(*(model(x) for model in models))
    assert len(convolutions) == 1


def test_upsampling_by_a_fraction_is_stocks(convolutions):
    module = stock_file.HunyuanVideoUpsampleCausal3D(6, 10, upsample_factor=(1, 1.5, 2))
    models = cases.twins(randomize(module).to(cases.WHERE["device"]))
    cases.agree(*(model(video(2, 6, 3, 4, 4)) for model in models))
    assert convolutions == [models[0].conv]


PARTS = ["norm1", "norm2", "nonlinearity", "conv1", "conv1.conv", "conv2", "conv_shortcut", "dropout"]


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_a_layer_sees_what_it_saw(name):
    models = cases.twins(block())
    x = video(1, 6, 3, 3, 4)
    hooks_see_the_same(models, name, lambda: cases.agree(*(m(x) for m in models)))


CHANGES = {
    "a-replaced-conv-forward": lambda m: setattr(
        m.conv1.conv, "_conv_forward", lambda x, w, b: nn.functional.conv3d(x, 2 * w, b)
    ),
    "another-norm": lambda m: setattr(m, "norm1", nn.Identity()),
    "a-norm-without-weights": lambda m: setattr(m, "norm1", nn.GroupNorm(2, 6, affine=False)),
    "another-activation": lambda m: setattr(m, "nonlinearity", nn.Tanh()),
    "another-mode": lambda m: setattr(m.conv2, "pad_mode", "reflect"),
    "dropout": drop_all,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_layers_run_stocks_code(change):
    models = cases.twins(block())
    for model in models:
        change(model)
        model.to(cases.WHERE["device"])
    x = video(1, 6, 3, 3, 4)
    cases.agree(*(model(x) for model in models))


@pytest.mark.parametrize("layer", ["decoder.mid_block.resnets.0.conv1", "decoder.mid_block.attentions.0.to_q",
                                   "decoder.conv_out", "decoder.up_blocks.1.upsamplers.0.conv.conv",
                                   "decoder.up_blocks.1.upsamplers.0"])  # fmt: skip
def test_a_hook_within_a_whole_model(layer):
    models = twins()
    for model in models:
        model.get_submodule(layer).register_forward_hook(lambda m, args, y: 2 * y)
    same(models, decode_of(codes(2, latents=(1, 1))))


def test_gradients_are_stocks(convolutions):
    models = cases.twins(block())
    cases.same_gradients(models, video(1, 6, 2, 3, 4))
    assert not convolutions


def test_autocast_runs_stocks_code(convolutions):
    models = cases.twins(block())
    x = video(1, 6, 2, 3, 4)
    with torch.autocast(cases.WHERE["device"], torch.bfloat16):
        found = [model(x) for model in models]
    assert not convolutions
    cases.agree(*found, bound=3e-2)


def test_under_a_compiler_convolutions_and_upsampling_are_diffusers_own(convolutions):
    module = randomize(stock_file.HunyuanVideoUpsampleCausal3D(6, 10)).to(cases.WHERE["device"])
    compiled = []

    def backend(graph, _):
        compiled.append(cases.operations_of(graph))
        return graph

    torch._dynamo.reset()
    x = video(1, 6, 2, 3, 4)
    models = cases.twins(module)
    cases.agree(*(torch.compile(model, backend=backend, fullgraph=True)(x) for model in models))
    assert compiled[0] == compiled[1]
    models = cases.twins(block())
    cases.agree(*(torch.compile(model, backend=backend, fullgraph=True)(x) for model in models))
    assert not convolutions


# --- numbers --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(dtype):
    is_no_less_exact(
        twins(dtype), (decode_of, codes(3, latents=(17, 23))), (encode_of, pixels(9, latents=(17, 23)))
    )
