"""Which models get plans, and what the report says of those that were not called."""

import copy
import gc
import weakref

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo
from torch import nn

import sdfastgn
from sdfastgn.patches.graphs.forward import GraphedForward
from sdfastgn.plans import forward
from sdfastgn.plans.forward import PlannedForward
from sdfastgn.plans.install import gets_plans
from tests.patches.cases import agree, noise
from tests.patches.samples import randomize, unet, vae
from tests.plans.models import CALLS

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.gamma[:, None, None]


class Convolutions(nn.Module):
    def __init__(self, first=nn.Conv2d):
        super().__init__()
        self.first = first(3, 8, 3) if first is nn.Conv2d else first(8, 3)
        self.rest = nn.Sequential(nn.Conv2d(8, 8, 3), Norm(), nn.Conv2d(8, 3, 3))

    def forward(self, x):
        return self.rest(F.silu(self.first(x)))


def test_lazy_weights_wait_for_their_first_call():
    model = Convolutions(nn.LazyConv2d)
    assert not gets_plans(model)
    assert sdfastgn.optimize(model, missing_ok=True) is model
    sdfastgn.report(model)
    stock = copy.deepcopy(model)
    stock(noise(1, 3, 9, 9))
    model.load_state_dict(stock.state_dict())
    sdfastgn.optimize(model)
    for seed in range(3):  # the first one still removes hooks
        agree(model(noise(1, 3, 8, 9, seed=seed)), stock(noise(1, 3, 8, 9, seed=seed)))
    assert len(vars(model)["forward"].plans) == 1


def test_weights_without_memory():
    with torch.device("meta"):
        model = Convolutions()
    sdfastgn.optimize(model)
    assert model(torch.empty(1, 3, 9, 9, device="meta")).shape == (1, 3, 3, 3)
    stock = randomize(Convolutions())
    model.load_state_dict(stock.state_dict(), assign=True)
    for seed in range(2):
        agree(model(noise(1, 3, 9, 9, seed=seed)), stock(noise(1, 3, 9, 9, seed=seed)))
    assert len(vars(model)["forward"].plans) == 1


def test_blocks_of_unets_of_videos_in_a_decoder():
    """It runs as plans, and such a UNet runs its fused blocks."""
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2}
    stock = randomize(diffusers.AutoencoderKLTemporalDecoder(**sizes, **blocks)).eval()
    model = sdfastgn.optimize(copy.deepcopy(stock))
    for seed in range(2):
        z = noise(2, 4, 3, 2, seed=seed)
        agree(model.decode(z, num_frames=2).sample, stock.decode(z, num_frames=2).sample, 5e-5)
    assert vars(model.decoder)["forward"].calls == 2
    blocks = {f"{way}_block_types": (f"{way.title()}BlockSpatioTemporal",) * 2 for way in ("down", "up")}
    with torch.device("meta"):
        assert not gets_plans(
            diffusers.UNetSpatioTemporalConditionModel(**sizes, **blocks, num_attention_heads=(2, 4))
        )


OF_IMAGES = [
    call
    for call in CALLS
    if call.cls in ("AutoencoderKL", "AutoencoderKLFlux2", "AsymmetricAutoencoderKL", "VQModel")
    and call.method in ("encode", "decode")
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("mode", ["auto", False])
@pytest.mark.parametrize("call", [pytest.param(call, id=call.name) for call in OF_IMAGES])
def test_autoencoders_of_images(call, mode):
    model, stock = (call.model() for _ in range(2))
    part = f"{call.method}r"
    sdfastgn.optimize(model, cuda_graphs=mode)
    for seed in range(2):
        inputs = call.drawn(seed)
        agree(*(call.run(each, **inputs)[0] for each in (model, stock)), 5e-5)
    found = {p.path: p for p in sdfastgn.report(model).plans if p.calls or p.own}
    assert {path: (p.plans, p.calls, p.own) for path, p in found.items() if path != "quantize"} == {
        part: (1, 2, {})
    }
    norms = [m for m in getattr(stock, part).modules() if isinstance(m, nn.GroupNorm)]
    is_spatial = call.settings.get("norm_type") == "spatial"
    assert found[part].steps["modulated_norm" if is_spatial else "group_norm"] == len(norms)
    sdfastgn.optimize(model, cuda_graphs=mode, plans=False)
    assert not any(p.is_on for p in sdfastgn.report(model).plans)


def test_a_unet_beside_an_autoencoder_keeps_its_fused_blocks():
    models = nn.ModuleList([randomize(unet()), randomize(vae())])
    one, other = sdfastgn.optimize(models)
    one(noise(2, 4, 4, 4), 10, noise(2, 3, 12))
    other.decode(noise(1, 4, 4, 4))
    assert {p.path for p in sdfastgn.report(models).plans if p.calls} == {"1.decoder"}


@pytest.mark.parametrize(
    "build",
    [lambda: vae().decoder, lambda: next(c for c in CALLS if c.cls == "UNet1DModel").model()],
    ids=["decoder", "unet_1d"],
)
def test_modules_in_a_model_with_graphs_have_no_plans(build):
    """A graph of the model would not compare them."""
    model = sdfastgn.optimize(build())
    assert GraphedForward.of(model).planner.is_always
    assert not [module for module in model.modules() if PlannedForward.of(module)]


def test_the_report_leaves_out_children_that_were_not_called():
    model = sdfastgn.optimize(randomize(Convolutions()))
    assert "plans of" not in str(sdfastgn.report(model))
    model(noise(1, 3, 9, 9))
    assert "plans of Convolutions: 1 alive" in str(sdfastgn.report(model))
    assert "plans of rest" not in str(sdfastgn.report(model))
    model.rest(noise(1, 8, 9, 9))
    assert "plans of rest: 1 alive" in str(sdfastgn.report(model))


class UnitNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        return F.normalize(x, dim=1, eps=self.eps)


class Scaled(nn.Identity):
    """No norm: it has neither weights nor an eps."""


@pytest.mark.parametrize(("kind", "has_plans"), [(UnitNorm, True), (Scaled, False)])
def test_norms_without_weights(kind, has_plans):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), kind(), nn.Conv2d(8, 3, 3))
    assert gets_plans(model) is has_plans


def ltx(name, **settings):
    blocks = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 4, "latent_channels": 4}
    channels = {"block_out_channels": (8, 8, 16, 16), "decoder_block_out_channels": (8, 16, 32)}
    model = getattr(diffusers, name)(**blocks, **channels, patch_size=2, **settings)
    return randomize(model)


CONDITIONED = {
    "timestep_conditioning": True,
    "decoder_inject_noise": (True, False, True, False),
    "decoder_spatio_temporal_scaling": (True,) * 3,
    "upsample_residual": (True, False, True),
    "upsample_factor": (2, 2, 2),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("AutoencoderKLLTXVideo", CONDITIONED), ("AutoencoderKLLTX2Video", {})],
)
def test_norms_without_weights_and_noise(name, settings):
    """As in the autoencoders of LTX-Video 0.9.1 and LTX-2."""
    if not hasattr(diffusers, name):
        pytest.skip(f"this diffusers has no {name}")
    stock = ltx(name, **settings)
    model = sdfastgn.optimize(copy.deepcopy(stock))
    times = [torch.full((1,), 0.05)] if settings else []
    for seed in range(2):
        results = []
        for each in (model, stock):
            torch.manual_seed(seed)
            results.append(each.decode(noise(1, 4, 2, 2, 3, seed=seed), *times).sample)
        agree(*results)
    assert {(p.path, p.plans, p.calls) for p in sdfastgn.report(model).plans if p.calls or p.own} == {
        ("decoder", 1, 2)
    }


def autoencoder():
    """Its decoder is a class whose calls become CUDA graphs. Neither half has fused blocks."""
    down, up = (("HunyuanVideo" + name,) * 2 for name in ("DownBlock3D", "UpBlock3D"))
    blocks = {"down_block_types": down, "up_block_types": up, "layers_per_block": 1, "norm_num_groups": 4}
    ratios = {"spatial_compression_ratio": 2, "temporal_compression_ratio": 4}
    sizes = {"latent_channels": 4, "block_out_channels": (8, 8)}
    return randomize(AutoencoderKLHunyuanVideo(**sizes, **blocks, **ratios))


def test_graphs_run_plans_where_a_class_has_graphs():
    model = autoencoder()
    stock = copy.deepcopy(model)
    sdfastgn.optimize(model)
    kinds = [type(vars(part).get("forward")) for part in (model, model.encoder, model.decoder)]
    assert kinds == [type(None), PlannedForward, GraphedForward]
    for seed in range(2):
        z, x = noise(1, 4, 2, 3, 2, seed=seed), noise(1, 3, 5, 6, 4, seed=seed)
        agree(model.decode(z).sample, stock.decode(z).sample)
        agree(model.encode(x).latent_dist.mean, stock.encode(x).latent_dist.mean)
    assert {p.path: (p.plans, p.calls) for p in sdfastgn.report(model).plans if p.calls} == {
        "encoder": (1, 2),
        "decoder": (1, 2),
    }


def test_a_network_over_one_axis():
    call = next(call for call in CALLS if call.cls == "UNet1DModel")
    model, stock = (call.model() for _ in range(2))
    sdfastgn.optimize(model)
    for seed in range(3):
        inputs = call.drawn(seed)
        agree(*(call.run(each, **inputs)[0] for each in (model, stock)))
    (planned,) = (p for p in sdfastgn.report(model).plans if p.calls)
    assert (planned.plans, planned.calls) == (1, 3)
    norms = [m for m in stock.modules() if isinstance(m, nn.GroupNorm)]
    assert planned.steps["group_norm"] == len(norms)
    assert not [step for step in planned.steps if "mish" in step]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", False])
def test_a_unet_whose_blocks_have_norms_of_their_own(mode):
    """Kandinsky 3's. One plan serves all times that are numbers, and one those that are tensors."""
    call = next(call for call in CALLS if call.cls == "Kandinsky3UNet")
    model, stock = (call.model() for _ in range(2))
    sdfastgn.optimize(model, cuda_graphs=mode)
    times = 10, 20.5, torch.tensor(7), torch.tensor(3)
    for seed, time in enumerate(times):
        inputs = {**call.drawn(seed), "timestep": time}
        agree(*(call.run(each, **inputs)[0] for each in (model, stock)), 1e-4)
    (planned,) = (p for p in sdfastgn.report(model).plans if p.calls)
    assert (planned.plans, planned.calls, planned.own) == (2, len(times), {})
    norms = [m for m in stock.modules() if isinstance(m, nn.GroupNorm)]
    assert planned.steps["group_norm"] == 2 * len(norms)
    sdfastgn.restore(model)
    assert torch.equal(*(call.run(each, **call.drawn(0))[0] for each in (model, stock)))


@pytest.mark.slow
@pytest.mark.parametrize("modes", [(False, "auto"), ("auto", False)])
def test_graphs_are_turned_on_and_off(modes):
    model = autoencoder()
    stock = copy.deepcopy(model)
    z = noise(1, 4, 2, 3, 2)
    kinds = {False: PlannedForward, "auto": GraphedForward}
    for mode in modes:
        sdfastgn.optimize(model, cuda_graphs=mode)
        assert type(vars(model.decoder)["forward"]) is kinds[mode]
        agree(model.decode(z).sample, stock.decode(z).sample)
        encoder = vars(model.encoder)["forward"]
    assert any(p.calls for p in sdfastgn.report(model).plans)
    with sdfastgn.optimized(model, cuda_graphs=modes[0]):
        agree(model.decode(z).sample, stock.decode(z).sample)
    assert type(vars(model.decoder)["forward"]) is kinds[modes[1]]
    assert vars(model.encoder)["forward"] is encoder  # with its plans
    sdfastgn.restore(model)
    assert not {"forward"} & {*vars(model.encoder), *vars(model.decoder)}
    assert torch.equal(model.decode(z).sample, stock.decode(z).sample)


@pytest.mark.slow
def test_a_unet_without_graphs_runs_as_plans():
    model = randomize(unet())
    stock = copy.deepcopy(model)
    x, states = noise(2, 4, 4, 4), noise(2, 3, 12)
    for mode, calls in (("auto", {}), (False, {"": 2}), ("auto", {})):
        sdfastgn.optimize(model, cuda_graphs=mode)
        for step in (10, 20.5):
            agree(model(x, step, states).sample, stock(x, step, states).sample, 1e-4)
        assert {p.path: p.calls for p in sdfastgn.report(model).plans if p.calls} == calls
    sdfastgn.optimize(model, cuda_graphs=False, plans=False)
    assert not sdfastgn.report(model).plans


@pytest.mark.slow
def test_a_plan_that_other_code_has_captured_lives_on(monkeypatch):
    """A user's graph of a planned call reads the plan's constants, also after the plan was dropped."""
    model = randomize(Convolutions())
    sdfastgn.optimize(model)
    x = noise(1, 3, 9, 9)
    model(x)
    planned = vars(model)["forward"]
    (plan,) = planned.plans
    held = weakref.ref(plan)
    monkeypatch.setattr(forward, "_is_capturing", lambda device: True)
    model(x)
    monkeypatch.undo()
    planned.clear()
    del plan
    gc.collect()
    assert held() is not None
