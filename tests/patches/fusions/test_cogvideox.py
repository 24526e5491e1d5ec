"""The fused autoencoder of CogVideoX: whole ones, in tiles, slices and batches of frames, and its blocks."""

from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as stock_file
from diffusers.models.downsampling import CogVideoXDownsample3D
from diffusers.models.upsampling import CogVideoXUpsample3D
from torch import nn

import sdfastgn
from sdfastgn.patches.fusions import cogvideox as fusion
from tests.patches import cases, samples, video_cases
from tests.patches.samples import randomize
from tests.patches.video_cases import (
    codes,
    decode_of,
    drop_all,
    encode_of,
    hooks_see_the_same,
    is_no_less_exact,
    is_restored_bit_by_bit,
    recorded,
    video,
)

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("on_each_device", "without_gradients")]

SIZES = {
    "down_block_types": ("CogVideoXDownBlock3D",) * 3,
    "up_block_types": ("CogVideoXUpBlock3D",) * 3,
    "block_out_channels": (8, 8, 16),
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_height": 16,
    "sample_width": 16,
}


def autoencoder(**options):
    return randomize(AutoencoderKLCogVideoX(**SIZES, **options))


def twins(dtype=torch.float32, **options):
    """(fused, stock)"""
    return cases.twins(autoencoder(**options).to(cases.WHERE["device"], dtype))


pixels = partial(video_cases.pixels, 4)


def same(models, call, bound=5e-5):
    fused, stock = video_cases.same(models, call, bound)
    assert fused.stride() == stock.stride()


def causal(C_in=6, C_out=10, kernel_size=3, **options):
    conv = stock_file.CogVideoXCausalConv3d(C_in, C_out, kernel_size, **options)
    return randomize(conv).to(cases.WHERE["device"])


def block(C_in=6, C_out=10, **options):
    options = {"groups": 2, "temb_channels": 0, "spatial_norm_dim": 4, **options}
    return randomize(stock_file.CogVideoXResnetBlock3D(C_in, C_out, **options)).to(cases.WHERE["device"])


def layouts(*shape):
    """A channels-last and a channels-first video."""
    x = video(*shape)
    return x, x.contiguous()


def contents(cache):
    """Entries of a ``conv_cache`` that upstream reads, by their path."""
    found = {}
    for name, entry in cache.items():
        if isinstance(entry, dict):
            found |= {f"{name}.{rest}": t for rest, t in contents(entry).items()}
        elif name not in ("conv_y", "conv_b") and entry is not None:
            found[name] = entry
    return found


@pytest.fixture
def convolutions(monkeypatch):
    """A list of the causal convolutions that run fused."""
    return recorded(monkeypatch, fusion, "convolve")


# --- whole models -------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
def test_decode(frames, launches):
    models = twins()
    assert not sdfastgn.report(models[0]).skipped
    z = codes(frames)
    same(models, decode_of(z))
    batches = max(frames // 2, 1)
    names = [name for name, *_ in launches]
    spatial = [m for m in models[0].decoder.modules() if isinstance(m, stock_file.CogVideoXSpatialNorm3D)]
    # One pass for each norm, for the first convolution, and for frames that are repeated.
    repeated = 0 if frames == 1 else 2
    assert names.count("frames") == batches * (len(spatial) + 1 + repeated)
    assert names.count("apply") + names.count("small") == 0


@pytest.mark.parametrize("frames", [1, 8, 9, 17])
def test_encode(frames, launches):
    models = twins()
    same(models, encode_of(pixels(frames)))
    names = [name for name, *_ in launches]
    norms = [m for m in models[0].encoder.modules() if isinstance(m, nn.GroupNorm)]
    assert names.count("frames") == max(frames // 8, 1) * (len(norms) + 1)
    assert names.count("apply") + names.count("small") == 0


@pytest.mark.parametrize("frames", [3, 5])
def test_a_cache_has_stocks_entries(frames):
    models = twins()
    found = []
    for model in models:
        cache = None
        for z in (codes(frames, latents=(1, 2)), codes(2, latents=(1, 2)) + 1):
            _, cache = model.decoder(z, conv_cache=cache)
            found.append(contents(cache))
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert ours.keys() == theirs.keys()
        assert len(ours) == 18
        for name, entry in theirs.items():
            cases.agree(ours[name], entry, 5e-5)


def test_odd_sizes():
    models = twins()
    same(models, decode_of(codes(3, latents=(1, 1))))
    same(models, decode_of(codes(3, latents=(3, 1))))
    same(models, encode_of(pixels(9, latents=(2, 2))[..., :-1, :-3]))


def test_strided_inputs():
    models = twins()
    same(models, decode_of(codes(6, latents=(4, 4))[:, :, ::2, ::2, 1::2]))
    same(models, encode_of(pixels(9, batch=2, latents=(2, 1)).transpose(3, 4)))


def test_slices_and_tiles(convolutions):
    models = twins()
    for model in models:
        model.enable_slicing()
        model.enable_tiling(tile_sample_min_height=8, tile_sample_min_width=8)

    def firsts():
        return sum(conv is models[0].decoder.conv_in for conv in convolutions)

    # Samples and tiles of columns, then tiles of rows and batches of frames.
    same(models, decode_of(codes(1, batch=2, latents=(1, 3))))
    assert firsts() == 2 * 3
    same(models, decode_of(codes(4, latents=(3, 1))))
    assert firsts() == 2 * 3 + 3 * 2
    same(models, encode_of(pixels(1, batch=2, latents=(3, 1))))


def test_convolutions_of_the_latents_around_the_model():
    options = {"use_quant_conv": True, "use_post_quant_conv": True}
    model = randomize(AutoencoderKLCogVideoX(**SIZES | {"latent_channels": 3}, **options))
    models = cases.twins(model.to(cases.WHERE["device"]))
    same(models, decode_of(codes(2, latents=(1, 2))[:, :3]))
    same(models, encode_of(pixels(8, latents=(1, 2))))


def test_large_videos_are_convolved_in_parts(monkeypatch):
    """Upstream does so above 2 GiB. Here the limit is lower for ours, and for stock it stays."""
    models = twins()
    expected = models[1].decode(codes(3)).sample
    monkeypatch.setattr(fusion, "_LARGEST_INPUT", 1e-6)
    parts = []
    original = fusion.convolve_padded
    monkeypatch.setattr(
        fusion, "convolve_padded", lambda conv, x, bias: parts.append(x) or original(conv, x, bias)
    )
    cases.agree(models[0].decode(codes(3)).sample, expected, 5e-5)
    frames = [x.shape[2] for x in parts if x.shape[1:2] + x.shape[3:] == (8, 8, 12)]
    # One frame at a time behind the two before it, nine times for each convolution.
    assert frames.count(3) == 9 * 5


def test_calls_leave_nothing_for_the_next_one():
    fused, _ = twins()
    z = codes(2, latents=(1, 2))
    first = fused.decode(z).sample
    fused.decode(codes(3, latents=(1, 2)) + 1)
    assert torch.equal(fused.decode(z).sample, first)


def test_restored_bit_by_bit():
    stock = autoencoder().to(cases.WHERE["device"])
    is_restored_bit_by_bit(stock, decode_of(codes(3, latents=(1, 2))), encode_of(pixels(9, latents=(1, 2))))


@pytest.mark.parametrize("pays", [False, True])
def test_statistics_of_the_kernel_before(pays, monkeypatch, launches):
    """Where they pay, a norm after a sum or a bias reads no more than the sum's statistics."""
    monkeypatch.setattr("sdfastgn.patches.layers.statistics.statistics_pay", lambda C, HW: pays)
    models = twins()
    same(models, decode_of(codes(3, latents=(1, 2))))
    read = cases.passes(launches)["statistics"]
    blocks = [m for m in models[0].decoder.modules() if isinstance(m, stock_file.CogVideoXResnetBlock3D)]
    # Always read: each block's second norm, and inputs whose frames were repeated.
    assert read == (len(blocks) + 2 if pays else 2 * len(blocks) + 1)


# --- when it is left alone ------------------------------------------------------------


def test_an_unknown_release_is_left(monkeypatch):
    samples.make_unknown(monkeypatch, "CogVideoXSafeConv3d.forward")
    report = sdfastgn.report(sdfastgn.optimize(autoencoder()))
    assert {e.fusion for e in report.fused} == {"group_norm", "cogvideox_upsample", "cogvideox_downsample"}
    (reason,) = {e.reason for e in report.skipped}
    assert reason.startswith("CogVideoXSafeConv3d.forward of this diffusers is not a version")


def test_an_activation_without_a_fused_form_is_skipped():
    model = block()
    model.nonlinearity = nn.Tanh()
    sdfastgn.optimize(model)
    (skipped,) = sdfastgn.report(model).skipped
    assert skipped.reason == "activation Tanh has no fused form"
    zq = video(1, 4, 1, 1, 1)
    assert model(video(1, 6, 1, 3, 4), None, zq)[0].shape == (1, 10, 1, 3, 4)


# --- blocks ---------------------------------------------------------------------------

PAIRS = [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (8, 2), (9, 3)]


@pytest.mark.parametrize(("frames", "of"), PAIRS, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (2, 4)], ids=str)
def test_spatial_norm(frames, of, size, launches):
    norm = randomize(stock_file.CogVideoXSpatialNorm3D(6, 4, groups=2)).to(cases.WHERE["device"])
    models = cases.twins(norm)
    zq = video(2, 4, of, 2, 3, seed=1)
    for x in layouts(2, 6, frames, 2 * size[0], 3 * size[1]):
        cases.agree(*(model(x, zq)[0] for model in models))
    assert cases.passes(launches)["frames"] == 2


@pytest.mark.parametrize(
    "sizes", [((4, 6, 6), (2, 2, 3)), ((3, 4, 6), (2, 2, 3)), ((4, 5, 6), (2, 2, 3)), ((6, 4, 6), (4, 2, 3))],
    ids=str,
)  # fmt: skip
def test_other_sizes_of_latents_are_stocks(sizes, launches):
    models = cases.twins(block())
    x, zq = video(1, 6, *sizes[0]), video(1, 4, *sizes[1], seed=1)
    cases.agree(*(model(x, None, zq)[0] for model in models))
    # The convolutions alone.
    assert cases.passes(launches)["frames"] == 2


@pytest.mark.parametrize("spatial", [None, 4])
@pytest.mark.parametrize("C_out", [6, 10])
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_block(is_wide, C_out, spatial, convolutions):
    models = cases.twins(block(6, C_out, spatial_norm_dim=spatial, conv_shortcut=is_wide))
    found = []
    for model in models:
        cache = None
        for frames in (3, 2, 1, 1):
            zq = None if spatial is None else video(2, 4, frames, 3, 2, seed=1)
            y, cache = model(video(2, 6, frames, 3, 4, seed=frames), None, zq, conv_cache=cache)
            found += [y, *contents(cache).values()]
    for ours, theirs in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        cases.agree(ours, theirs)
    assert len(convolutions) == 4 * (2 + (is_wide and C_out != 6))


CONVOLUTIONS = [{}, {"stride": 2}, {"stride": (1, 2, 2)}, {"kernel_size": 1}, {"kernel_size": (1, 5, 3)}]


@pytest.mark.parametrize("pad_mode", ["replicate", "first", "constant"])
@pytest.mark.parametrize("options", [*CONVOLUTIONS, {"dilation": 2}], ids=str)
def test_convolutions(options, pad_mode, convolutions):
    models = cases.twins(causal(pad_mode=pad_mode, **options))
    front = models[0].time_kernel_size - 1
    for x in layouts(2, 6, 5, 5, 6):
        for cache in (None, video(2, 6, front, 5, 6, seed=1)) if front else (None,):
            (fused, kept), (stock, wanted) = (model(x, cache) for model in models)
            cases.agree(fused, stock)
            if pad_mode != "replicate" and front:
                assert torch.equal(kept, wanted)
            else:
                assert kept is None
    assert bool(convolutions) == ("dilation" not in options and pad_mode != "replicate")


@pytest.mark.parametrize("compress_time", [False, True])
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
@pytest.mark.parametrize("low", [False, True])
def test_upsampling(low, frames, compress_time, monkeypatch):
    if low:
        monkeypatch.setattr(fusion, "convolves_at_low_resolution", lambda conv, x: True)
        monkeypatch.setattr("sdfastgn.kernels.upsample.conv.phases_pay", lambda *sizes: True)
    models = cases.random_twins(CogVideoXUpsample3D(6, 10, compress_time=compress_time))
    for x in layouts(2, 6, frames, 3, 4):
        cases.agree(*(model(x) for model in models))


@pytest.mark.parametrize("compress_time", [False, True])
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_downsampling(frames, compress_time):
    models = cases.random_twins(CogVideoXDownsample3D(6, 10, compress_time=compress_time))
    for x in layouts(2, 6, frames, 5, 6):
        cases.agree(*(model(x) for model in models))


PARTS = ["norm1", "norm1.norm_layer", "norm1.conv_y", "norm2.conv_b.conv", "nonlinearity", "conv1",
         "conv1.conv", "conv2", "conv_shortcut", "dropout"]  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_on_a_layer_sees_what_it_saw(name):
    models = cases.twins(block())
    x, zq = video(1, 6, 3, 4, 4), video(1, 4, 3, 2, 2)
    hooks_see_the_same(models, name, lambda: cases.agree(*(m(x, None, zq)[0] for m in models)))


CHANGES = {
    "a-replaced-conv-forward": lambda m: setattr(
        m.conv1.conv, "_conv_forward", lambda x, w, b: nn.functional.conv3d(x, 2 * w, b, padding=(0, 1, 1))
    ),
    "another-norm": lambda m: setattr(m.norm1, "norm_layer", nn.Identity()),
    "a-norm-without-weights": lambda m: setattr(m.norm1, "norm_layer", nn.GroupNorm(2, 6, affine=False)),
    "another-activation": lambda m: setattr(m, "nonlinearity", nn.Tanh()),
    "dropout": drop_all,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_layers_run_stocks_code(change):
    models = cases.twins(block())
    for model in models:
        change(model)
        model.to(cases.WHERE["device"])
    x, zq = video(1, 6, 3, 4, 4), video(1, 4, 3, 2, 2)
    cases.agree(*(model(x, None, zq)[0] for model in models))


LAYERS = ["decoder.mid_block.resnets.0.conv1", "decoder.conv_in", "decoder.norm_out.conv_y.conv",
          "decoder.norm_out", "decoder.conv_out", "decoder.conv_act",
          "decoder.up_blocks.1.upsamplers.0.conv"]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_a_hook_within_a_whole_model(layer):
    def double(module, args, y):
        return (2 * y[0], y[1]) if isinstance(y, tuple) else 2 * y

    models = twins()
    for model in models:
        model.get_submodule(layer).register_forward_hook(double)
    same(models, decode_of(codes(4, latents=(1, 1))))


def test_a_hook_that_comes_between_batches_of_frames(convolutions):
    """Stock's code then reads the cache that fused code has written."""
    results = []
    for model in twins():
        first, cache = model.decoder(codes(3))
        convolutions.clear()
        model.decoder.mid_block.resnets[0].register_forward_hook(lambda m, args, y: None)
        model.decoder.conv_out.register_forward_hook(lambda m, args, y: None)
        results.append(torch.cat((first, model.decoder(codes(2) + 1, conv_cache=cache)[0]), 2))
    cases.agree(*results, 5e-5)


def test_gradients_are_stocks(convolutions):
    class First(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, zq):
            return self.model(x, None, zq)[0]

    models = [First(model) for model in cases.twins(block())]
    x, zq = video(1, 6, 3, 4, 4), video(1, 4, 3, 2, 2)
    cases.same_gradients(models, x.requires_grad_(), zq.requires_grad_())
    assert not convolutions


def test_autocast_runs_stocks_code(convolutions):
    models = cases.twins(block())
    x, zq = video(1, 6, 3, 4, 4), video(1, 4, 3, 2, 2)
    with torch.autocast(cases.WHERE["device"], torch.bfloat16):
        found = [model(x, None, zq)[0] for model in models]
    assert not convolutions
    cases.agree(*found, bound=5e-2)


def test_under_a_compiler_convolutions_are_diffusers_own(convolutions):
    x, zq = video(1, 6, 3, 4, 4), video(1, 4, 3, 2, 2)
    up, down = (
        randomize(cls(6, 6, compress_time=True)) for cls in (CogVideoXUpsample3D, CogVideoXDownsample3D)
    )
    for module in (causal(), up, down):
        models = cases.twins(module.to(cases.WHERE["device"]))
        cases.compiles_to_stocks_graph(models, lambda model: _first(model(x)))
    models = cases.twins(block())
    torch._dynamo.reset()
    compiled = (torch.compile(model, backend="eager", fullgraph=True) for model in models)
    cases.agree(*(model(x, None, zq)[0] for model in compiled))
    assert not convolutions


def _first(y):
    return y[0] if isinstance(y, tuple) else y


# --- numbers --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_less_exact_than_stock(dtype):
    is_no_less_exact(
        twins(dtype), (decode_of, codes(3, latents=(17, 23))), (encode_of, pixels(9, latents=(17, 23)))
    )
