"""The architectures are the published ones, and their random weights are usable."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNetMotionModel
from torch import nn

from sdfastgn.models import architectures, video
from sdfastgn.models.configurations import SEEDS, VIDEO_NETWORKS
from tests.small_video import SETTINGS, shrink


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("build", "model", "count"),
    [
        pytest.param(architectures.build_unet, "sd15", 859_520_964, id="unet-sd15"),
        pytest.param(architectures.build_unet, "sdxl", 2_567_463_684, id="unet-sdxl"),
        pytest.param(architectures.build_vae, "sd15", 83_653_863, id="vae-sd15"),
        pytest.param(architectures.build_vae, "sdxl", 83_653_863, id="vae-sdxl"),
        pytest.param(architectures.build_unet, "lcm", 859_520_964 + 256 * 320, id="unet-lcm"),
        pytest.param(architectures.build_unet, "sd_turbo", 865_910_724, id="unet-sd-turbo"),
        pytest.param(architectures.build_vae, "sd_turbo", 2_445_063, id="vae-sd-turbo"),
    ],
)
def test_parameter_counts(build, model, count):
    assert parameters(build(model, torch.float16, "meta")) == count


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model", ["tiny", "tiny_xl"])
def test_tiny_models_run_and_are_reproducible(model):
    where = {"dtype": torch.float32, "device": "cpu"}
    inputs = architectures.unet_inputs(model, size=64, batch=2, seed=0, **where)
    latents = architectures.vae_latents(model, size=64, batch=1, seed=0, **where)
    with torch.no_grad():
        steps = [architectures.build_unet(model, **where, seed=s)(**inputs).sample for s in (0, 0, 1)]
        images = [architectures.build_vae(model, **where, seed=s).decode(latents).sample for s in (0, 0, 1)]
    for same, again, other in (steps, images):
        assert torch.equal(same, again)
        assert not torch.allclose(same, other)
        assert 0.05 < same.std() < 20
    assert (steps[0].shape, images[0].shape) == ((2, 4, 8, 8), (1, 3, 64, 64))


@pytest.mark.parametrize("seed", [SEEDS[0], SEEDS[-1]])
def test_any_seed_of_64_bits_will_do(seed):
    inputs = architectures.unet_inputs(
        "tiny_xl", size=8, batch=1, seed=seed, dtype=torch.float32, device="cpu"
    )
    assert inputs["sample"].isfinite().all()


def test_norms_of_tiny_models_have_random_affines_and_groups_of_odd_sizes():
    unet = architectures.build_unet("tiny", torch.float32, "cpu")
    norms = [m for m in unet.modules() if isinstance(m, nn.GroupNorm)]
    assert all(m.weight.std() > 0.01 and m.bias.std() > 0.01 for m in norms)
    per_group = {m.num_channels // m.num_groups for m in norms}
    assert any(n & (n - 1) for n in per_group)


# (model, part) -> parameters, and the shape of the output.
VIDEO = {
    ("flux", "transformer"): (11_901_408_320, (1, 4096, 64)),
    ("flux2_klein", "transformer"): (3_875_544_576, (1, 4096, 128)),
    ("sd35", "transformer"): (2_243_171_520, (2, 16, 128, 128)),
    ("zimage", "transformer"): (6_154_908_736, (1, 16, 1, 128, 128)),
    ("ltx", "transformer"): (1_923_385_472, (2, 6144, 128)),
    ("wan", "vae"): (126_892_531, (1, 3, 17, 480, 832)),
    ("wan", "transformer"): (1_418_996_800, (1, 16, 9, 60, 104)),
    ("qwen_image", "vae"): (126_892_531, (1, 3, 1, 1024, 1024)),
    ("qwen_image", "transformer"): (20_430_401_088, (1, 4096, 64)),
    ("qwen_image_21", "vae"): (337_740_404, (1, 4, 1, 1024, 1024)),
    ("dc_ae", "vae"): (312_250_275, (1, 3, 1024, 1024)),
    ("kvae", "vae"): (217_426_723, (1, 3, 1024, 1024)),
    ("hunyuan_video", "vae"): (246_478_803, (1, 3, 17, 480, 832)),
    ("cogvideox", "vae"): (215_583_907, (1, 3, 9, 480, 720)),
    ("cogvideox", "transformer"): (5_570_283_072, (2, 13, 16, 60, 90)),
    ("svd", "unet"): (1_524_623_082, (2, 14, 4, 72, 128)),
    ("svd", "vae"): (97_742_847, (4, 3, 576, 1024)),
    ("animatediff", "unet"): (859_520_964 + 453_209_280, (2, 4, 16, 64, 64)),
}


def test_every_video_network_is_here():
    keys = [(model, part) for model, networks in VIDEO_NETWORKS.items() for part in networks]
    assert keys == list(VIDEO) == list(SETTINGS)


@pytest.mark.slow
@pytest.mark.usefixtures("no_tables_of_positions")
@pytest.mark.parametrize(("model", "part"), VIDEO, ids=["-".join(key) for key in VIDEO])
def test_video_networks_are_the_published_ones(model, part):
    network = VIDEO_NETWORKS[model][part]
    where = {"dtype": torch.float16, "device": "meta"}
    built = architectures.build_video_network(network, **where)
    size = {"frames": network.frames, "height": network.height, "width": network.width}
    inputs = video.inputs(built, lambda *shape: torch.empty(shape, **where), batch=network.batch, **size)
    with torch.no_grad():
        found = parameters(built), tuple(video.run(built, inputs).shape)
    assert found == VIDEO[model, part]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("model", "part"), VIDEO, ids=["-".join(key) for key in VIDEO])
def test_small_video_networks_run_and_are_reproducible(model, part, monkeypatch):
    shrink(monkeypatch)
    network = VIDEO_NETWORKS[model][part]
    where = {"dtype": torch.float32, "device": "cpu"}
    size = {"batch": 1, "frames": network.frames, "height": 32, "width": 48}

    def output(seed):
        built = architectures.build_video_network(network, **where, seed=seed)
        with torch.no_grad():
            return video.run(built, video.random_inputs(built, **size, **where, seed=seed))

    same, again, other = map(output, (0, 0, 1))
    assert torch.equal(same, again)
    assert not torch.allclose(same, other)
    assert 0.05 < same.std() < 20


def test_buffers_are_those_of_the_class(monkeypatch):
    shrink(monkeypatch)
    network = VIDEO_NETWORKS["animatediff"]["unet"]
    expected = dict(UNetMotionModel(**network.config).named_buffers())
    found = dict(architectures.build_video_network(network, torch.float32, "cpu").named_buffers())
    assert expected
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
