"""CUDA graphs of autoencoders for videos and large images, whose decoders keep frames between two steps."""

import copy
import itertools
from collections import defaultdict

import diffusers
import pytest
import torch
from torch import nn

import sdfastgn
from sdfastgn.patches.graphs import install as cuda_graphs
from sdfastgn.patches.graphs import models
from tests.patches.cases import noise
from tests.patches.graphs.cases import DEVICES, agree, optimized, reasons_of, state
from tests.patches.graphs.tape import TapeBackend
from tests.patches.samples import each_copy, randomize, snapshot

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]}
HUNYUAN = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "spatial_compression_ratio": 2,
    "sample_size": 8,
}
LTX = {
    "latent_channels": 4,
    "block_out_channels": (8,) * 4,
    "decoder_block_out_channels": (8,) * 4,
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 5,
    "spatio_temporal_scaling": (True, False, False, False),
    "decoder_spatio_temporal_scaling": (True, False, False, False),
    "patch_size": 1,
}
COSMOS = {
    "encoder_block_out_channels": (8, 8, 8, 8),
    "decode_block_out_channels": (8, 8, 8, 8),
    "latent_channels": 4,
    "num_layers": 1,
    "latents_mean": None,
    "latents_std": None,
}
HUNYUAN_VIDEO = {
    "latent_channels": 4,
    "block_out_channels": (8, 8),
    "down_block_types": ("HunyuanVideoDownBlock3D",) * 2,
    "up_block_types": ("HunyuanVideoUpBlock3D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "spatial_compression_ratio": 2,
    "temporal_compression_ratio": 4,
}
HUNYUAN_15 = {
    "latent_channels": 4,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "spatial_compression_ratio": 2,
    "temporal_compression_ratio": 2,
}


QWEN_21 = {**WAN, "decoder_base_dim": 8, "dim_mult": [1, 2, 2], "temperal_downsample": [False, True]}


def family(name, settings, *shape):
    missing = not hasattr(diffusers, name)
    marks = pytest.mark.skipif(missing, reason=f"this diffusers has no {name}")
    return pytest.param((name, settings, shape), id=name.removeprefix("AutoencoderKL"), marks=marks)


# (name of the autoencoder, settings, shape of its latents). The first two keep frames in a list.
CHUNKED = [
    family("AutoencoderKLQwenImage", WAN, 1, 4, 1, 2, 3),
    family("AutoencoderKLWan", WAN, 1, 4, 1, 2, 3),
]
PLAIN = [
    family("AutoencoderKLHunyuanImage", HUNYUAN, 1, 4, 2, 3),
    family("AutoencoderKLLTXVideo", LTX, 1, 4, 2, 2, 3),
]
# Without a test of their tiles. Cosmos has none, and Qwen-Image 2.1 decodes only one frame.
OTHERS = [
    family("AutoencoderKLQwenImage21", QWEN_21, 1, 4, 1, 2, 3),
    family("AutoencoderKLCosmos", COSMOS, 1, 4, 2, 2, 3),
    family("AutoencoderKLHunyuanVideo", HUNYUAN_VIDEO, 1, 4, 1, 2, 3),
    family("AutoencoderKLHunyuanVideo15", HUNYUAN_15, 1, 4, 1, 2, 3),
    family("AutoencoderKLHunyuanImageRefiner", HUNYUAN_15, 1, 4, 1, 2, 3),
]
each_family = pytest.mark.parametrize("case", [*CHUNKED, *PLAIN, *OTHERS])
each_chunked = pytest.mark.parametrize("case", CHUNKED)
each_plain = pytest.mark.parametrize("case", PLAIN)


def twins(case, device="cpu", mode="auto", backend=None):
    """(optimized autoencoder, stock one with the same weights)"""
    name, settings, _ = case
    torch.manual_seed(3)
    stock = randomize(getattr(diffusers, name)(**settings)).to(device)
    if settings is WAN:
        stock.spatial_compression_ratio = 2
    for p in stock.decoder.conv_out.parameters():
        p.mul_(0.5)  # a decode is cut off at -1 and 1
    return optimized(copy.deepcopy(stock), mode, backend), stock


def decodes(vaes, *shape, seeds=range(3)):
    """Decode other latents in each call, and compare the results."""
    for seed in seeds:
        z = noise(*shape, seed=seed, mean=0.0).to(vaes[1].device)
        ours, theirs = (vae.decode(z).sample for vae in vaes)
        assert 0 < theirs.abs().max() < 1e3
        agree(ours, theirs)


def counts(vae):
    return state(vae).captured, state(vae).replays


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@each_family
def test_new_latents_in_the_same_graph(case, device):
    vaes = twins(case, device)
    decodes(vaes, *case[2])
    assert counts(vaes[0]) == (1, 2)


@pytest.mark.gpu
@each_family
def test_a_graph_gives_the_same_bits_as_a_call_without_one(case):
    vae, _ = twins(case, "cuda", mode=False)
    z = noise(*case[2], mean=0.0).to("cuda")
    expected = vae.decode(z).sample
    optimized(vae)
    for _ in range(3):
        assert torch.equal(vae.decode(z).sample, expected)
    assert counts(vae) == (1, 2)


@pytest.mark.slow
@each_chunked
def test_each_number_of_frames_has_its_graph(case):
    vaes = twins(case)
    for frames in (1, 3, 1, 3):
        decodes(vaes, 1, 4, frames, 2, 3, seeds=range(2))
    decodes(vaes, 1, 4, 1, 3, 2, seeds=range(2))
    assert counts(vaes[0]) == (3, 7)


@pytest.mark.slow
@each_chunked
def test_the_caches_are_as_after_a_stock_call(case):
    vaes = twins(case)
    decodes(vaes, *case[2])
    decodes(vaes, 1, 4, 3, 2, 3)  # a plan of one frame does not set them
    for name in models.scratch_of(vaes[0]):
        assert getattr(vaes[0], name) == getattr(vaes[1], name)


@pytest.mark.drawn(1)
@each_chunked
def test_an_encode_keeps_the_graphs(case):
    vaes = twins(case)
    for seed in range(3):
        x = noise(1, 3, 1, 4, 6, seed=seed)
        agree(*(vae.encode(x).latent_dist.mean for vae in vaes))
        decodes(vaes, *case[2], seeds=(seed,))
    assert (*counts(vaes[0]), state(vaes[0]).dropped) == (1, 2, 0)


@pytest.mark.drawn(1)
@each_chunked
def test_a_changed_model_has_a_new_graph(case):
    vaes = twins(case)
    decodes(vaes, *case[2])
    for vae in vaes:
        vae.post_quant_conv.weight = nn.Parameter(vae.post_quant_conv.weight * -2)
    decodes(vaes, *case[2])
    assert counts(vaes[0]) == (2, 4)
    assert "post_quant_conv" in state(vaes[0]).last_change


@pytest.mark.slow
@each_family
def test_images_in_slices(case):
    vaes = twins(case)
    for vae in vaes:
        vae.use_slicing = True
    decodes(vaes, 3, *case[2][1:], seeds=range(2))
    assert counts(vaes[0]) == (1, 5)


@pytest.mark.slow
@each_chunked
def test_tiles_have_no_graph(case):
    vaes = twins(case)
    for vae in vaes:
        vae.enable_tiling(4, 4, 2, 2)
    decodes(vaes, 1, 4, 1, 4, 4)
    assert state(vaes[0]).eager == {"tiling is enabled": 3}
    for vae in vaes:
        vae.use_tiling = False
    decodes(vaes, 1, 4, 1, 4, 4)
    assert counts(vaes[0]) == (1, 2)


@pytest.mark.slow
@each_plain
def test_tiles_share_a_graph(case):
    vaes = twins(case)
    for vae in vaes:
        if "Hunyuan" in case[0]:
            vae.enable_tiling(8, 0.5)
        else:
            vae.enable_tiling(8, 8, None, 4, 4)
    # Of the 3 x 3 tiles the last ones of a row and of a column are narrower: there are four kinds.
    decodes(vaes, *case[2][:-2], 6, 6, seeds=range(2))
    assert counts(vaes[0]) == (4, 2 * 9 - 4)


@pytest.mark.drawn(1)
@each_family
def test_a_large_call_has_no_graph(case, monkeypatch):
    # 12 latents of 2 x 2 pixels each.
    small = {name: kind._replace(most_pixels=48, scale=2) for name, kind in models._DECODERS.items()}
    monkeypatch.setattr(models, "_DECODERS", small)
    vaes = twins(case)
    decodes(vaes, *case[2][:-2], 2, 3)
    decodes(vaes, *case[2][:-2], 2, 7)
    assert counts(vaes[0]) == (1, 2)
    assert state(vaes[0]).eager["the call is so large that the GPU takes longer than Python"] == 3


@pytest.mark.slow
@each_family
def test_a_graph_is_given_up_if_it_leaves_too_little_memory(case):
    backend = TapeBackend()
    backend.room = False
    vaes = twins(case, backend=backend)
    decodes(vaes, *case[2])
    assert (state(vaes[0]).alive, state(vaes[0]).replays, backend.captures) == (0, 0, 1)
    assert "memory was short" in reasons_of(vaes[0])


def only_before(clear):
    turns = defaultdict(lambda: itertools.cycle((True, False)))

    def clear_cache(vae):
        if next(turns[vae]):
            clear(vae)

    return clear_cache, "leaves a tensor in the attribute _feat_map"


def only_after(clear):
    def clear_cache(vae):
        if vars(vae).get("_conv_idx", [0]) != [0]:
            clear(vae)

    return clear_cache, "has no attribute '_feat_map'"


@pytest.mark.drawn(1)
@each_chunked
@pytest.mark.parametrize("when", [only_before, only_after])
def test_caches_that_outlive_a_call(case, when, monkeypatch):
    """As if a release of diffusers cleared its caches only before a decode, or only after it."""
    vaes = twins(case)
    for vae in vaes:
        vae.clear_cache()
    kind = getattr(diffusers, case[0])
    clear_cache, reason = when(kind.clear_cache)
    monkeypatch.setattr(kind, "clear_cache", clear_cache)
    decodes(vaes, *case[2])
    assert state(vaes[0]).captured == 0
    assert reason in reasons_of(vaes[0])


@pytest.mark.drawn(1)
@each_family
def test_gradients_beside_graphs(case):
    vaes = twins(case, mode="training")
    decodes(vaes, *case[2])
    z = noise(*case[2], mean=0.0).requires_grad_()
    with torch.enable_grad():
        ours, theirs = (torch.autograd.grad(vae.decode(z).sample.square().sum(), z)[0] for vae in vaes)
    agree(ours, theirs)
    without, with_gradients = sdfastgn.report(vaes[0]).graphs
    assert without.replays == 2
    assert with_gradients.eager == {"gradients are enabled": 1}


@pytest.mark.drawn(1)
@each_family
def test_restored_bit_by_bit(case):
    _, vae = twins(case)
    z = noise(*case[2], mean=0.0)
    expected, before = vae.decode(z).sample, snapshot(vae)
    optimized(vae)
    for _ in range(3):
        vae.decode(z)
    assert counts(vae) == (1, 2)
    sdfastgn.restore(vae)
    assert snapshot(vae) == before
    assert torch.equal(vae.decode(z).sample, expected)


@pytest.mark.drawn(1)
@each_chunked
@each_copy
def test_a_copy_is_independent(case, copied):
    vae, stock = twins(case)
    decodes((vae, stock), *case[2])
    twin = copied(vae)
    assert vae._decode.module is vae
    assert twin._decode.module is twin
    cuda_graphs.install(twin, "auto", TapeBackend())
    del vae
    decodes((twin, stock), *case[2])
    assert counts(twin) == (1, 2)


@each_chunked
def test_a_decode_that_other_code_replaced_stays(case):
    vae, _ = twins(case)
    sdfastgn.restore(vae)
    foreign = vae._decode = lambda z: None
    sdfastgn.optimize(vae)
    assert vae._decode is foreign
    assert state(vae).eager == {"other code replaced its _decode": 0}
