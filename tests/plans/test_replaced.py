"""Models with CUDA graphs run plans where their fused blocks would ignore replaced code, or are unknown."""

import copy
import pickle

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D

import sdfastgn
from sdfastgn.models.architectures import build_unet, unet_inputs
from sdfastgn.patches.fusions import conv_norm_out, tiled_decode
from sdfastgn.patches.swap import fusion
from sdfastgn.patches.swap.tested_sources import Untested
from sdfastgn.plans import install
from sdfastgn.plans.forward import PlannedForward
from tests.patches.cases import noise
from tests.patches.code.foreign import OF_UNETS, halved, replaced
from tests.patches.graphs.cases import DEVICES, agree, lora, make, run, state
from tests.patches.samples import randomize

pytestmark = pytest.mark.fused_on_cpu

# Fused blocks ignore all of it but the attention, which they call by its name.
IGNORED = OF_UNETS[1:]
# On a CPU a tape stands for a CUDA graph. It records in a dispatch mode, in which no plan runs.
IN_CAPTURES = set() if torch.cuda.is_available() else {"a dispatch or function mode is active"}


_BLOCK = halved(ResnetBlock2D.forward)


def block():
    """A context in which another forward of ResNet blocks is on, always the same function."""
    return replaced(ResnetBlock2D, "forward", lambda stock: _BLOCK)


@pytest.fixture(params=DEVICES)
def made(request):
    """(optimized UNet, its stock copy, inputs)"""
    unet, stock, inputs = make(request.param, "auto")
    install.install(unet, True)
    return unet, stock, inputs


def planned(unet):
    """The plans of the UNet's calls while code is replaced."""
    graphed = install.GraphedForward.of(unet)
    (found,) = graphed.planned
    return found


def test_a_move_reaches_the_plans(made):
    """They let go of weights that were moved away."""
    unet, _, inputs = made
    with block():
        run(unet, inputs)
        run(unet, inputs)
        (plans,) = planned(unet)._by_state.values()
        (plan,) = plans.made.values()
        assert plan.baked._bound.run is not None
    unet.double()
    assert plan.baked._bound.run is None


def follows(unet, stock, inputs, calls=4):
    expected = run(stock, inputs)
    for _ in range(calls):
        agree(run(unet, inputs), expected)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("case", IGNORED, ids=lambda case: f"{case[0].__name__}.{case[1]}")
def test_replaced_code_runs_as_a_plan(made, case):
    unet, stock, inputs = made
    usual = follows(unet, stock, inputs)
    with replaced(*case):
        assert (follows(unet, stock, inputs) - usual).abs().max() > 1e-2  # so that this test can fail
    follows(unet, stock, inputs)
    found = planned(unet)
    assert found.traces == 1
    assert found.calls > 0
    assert set(found.own) <= IN_CAPTURES
    assert state(unet).alive == 2


def test_without_replaced_code_there_is_no_plan(made):
    unet, stock, inputs = made
    follows(unet, stock, inputs)
    graphed = install.GraphedForward.of(unet)
    assert graphed.planned == []


@pytest.mark.slow
def test_one_plan_for_all_timesteps(made):
    unet, stock, inputs = made
    follows(unet, stock, inputs)
    with block():
        for t in (3, 500, 7.0, 11.0, torch.tensor(20), torch.tensor(30)):
            follows(unet, stock, {**inputs, "timestep": t}, calls=2)
    assert planned(unet).traces <= 3  # of an int, a float and a tensor


@pytest.mark.slow
def test_adapters_change_while_code_is_replaced(made):
    unet, stock, inputs = made
    for each in (unet, stock):
        lora(each)
    follows(unet, stock, inputs)
    with block():
        follows(unet, stock, inputs)
        for each in (unet, stock):
            each.set_adapters(each.active_adapters(), 0.3)
        follows(unet, stock, inputs)
        for each in (unet, stock):
            each.disable_adapters()
        follows(unet, stock, inputs)
    follows(unet, stock, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_adapters_where_no_code_is_known(monkeypatch, device):
    unknown_everywhere(monkeypatch)
    unet, stock, inputs = make(device, "auto")
    install.install(unet, True)
    for each in (unet, stock):
        lora(each)
    for scale in (None, 0.5, 0.0, -1.0):
        values = inputs if scale is None else {**inputs, "cross_attention_kwargs": {"scale": scale}}
        follows(unet, stock, values)
    for scale in (1.0, -0.5):
        for each in (unet, stock):
            each.set_adapters("a", scale)
        follows(unet, stock, inputs)
    found = planned(unet)
    assert found.traces == 1
    assert found.calls > 0
    assert set(found.own) <= IN_CAPTURES
    assert state(unet).captured == 1


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(made, copied):
    unet, stock, inputs = made
    other = copied(unet)
    with block():
        follows(other, stock, inputs)
        follows(unet, stock, inputs)
    assert planned(other) is not planned(unet)


@pytest.mark.slow
def test_plans_off(made):
    unet, stock, inputs = made
    with block():
        follows(unet, stock, inputs)
        install.install(unet, False)
        graphed = install.GraphedForward.of(unet)
        assert (graphed.planner, graphed.alive) == (None, 0)
        follows(unet, stock, inputs)
        assert graphed.planned == []


def test_gradients_while_code_is_replaced(made):
    unet, stock, inputs = made
    with block():
        follows(unet, stock, inputs)
        for each in (unet, stock):
            each(**inputs).sample.square().mean().backward()
        for a, b in zip(unet.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-3)


def unknown_everywhere(monkeypatch):
    for where in (fusion, conv_norm_out, tiled_decode):
        monkeypatch.setattr(where, "unknown_source", lambda *sources: Untested("it is not known"))


def unknown(monkeypatch, cls):
    own = cls.forward

    def forward(self, *args, **kwargs):
        return own(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", forward)


def unknown_resnets(monkeypatch):
    unknown(monkeypatch, ResnetBlock2D)


def autoencoder():
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4}
    kinds = {"down": "DownEncoderBlock2D", "up": "UpDecoderBlock2D"}
    blocks = {f"{end}_block_types": (kind, kind) for end, kind in kinds.items()}
    return randomize(AutoencoderKL(**sizes, **blocks)).eval()


def unet():
    return build_unet("tiny", torch.float32, "cpu")


def unknown_blocks(monkeypatch):
    unknown(monkeypatch, BasicTransformerBlock)


@torch.no_grad()
def sample(model):
    if isinstance(model, AutoencoderKL):
        return model.decode(noise(1, 4, 6, 6)).sample
    return model(**unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0)).sample


@pytest.mark.drawn(1)
@pytest.mark.parametrize("change", [unknown_everywhere, unknown_resnets])
@pytest.mark.parametrize("build", [autoencoder, unet])
def test_a_release_that_was_never_tested(monkeypatch, change, build):
    stock = build()
    model = copy.deepcopy(stock)
    change(monkeypatch)
    monkeypatch.setattr("sdfastgn.api.noted", set())  # it warns once in a process
    with pytest.warns(UserWarning, match="was not tested with"):
        sdfastgn.optimize(model)
    for _ in range(3):
        agree(sample(model), sample(stock))
    assert planned(getattr(model, "decoder", model)).calls == 3
    assert "would run as plans" not in str(sdfastgn.report(model))
    sdfastgn.restore(model)
    assert not any(isinstance(vars(m).get("forward"), PlannedForward) for m in model.modules())


@pytest.mark.parametrize("change", [unknown_resnets, unknown_blocks])
def test_unknown_code_without_convolutions_of_its_own_leaves_the_fused_blocks(monkeypatch, change):
    model = unet()
    change(monkeypatch)
    assert sdfastgn.report(model).skipped
    assert install.gets_plans(model) == (change is unknown_resnets)
