"""The device on which a pipeline works: found in one walk, or by upstream's code."""

import functools

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from torch import nn

import sdfastgn
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.pipeline import device as device_fusion
from tests.patches.pipeline import cases

pytestmark = pytest.mark.fused_on_cpu

applied = functools.partial(cases.applied, device_fusion.FUSION)


@pytest.fixture
def pipe():
    return build_pipeline("tiny", dtype=torch.float32, device="cpu")


def test_the_device_is_found_without_upstreams_search(pipe, monkeypatch):
    before = pipe._execution_device
    applied(pipe)
    monkeypatch.setattr(DiffusionPipeline, "components", None)  # where upstream's begins
    assert pipe._execution_device == before == torch.device("cpu")
    for name in ("unet", "vae", "text_encoder"):
        getattr(pipe, name).to("meta")
    assert device_fusion._device_without_hooks(pipe) == pipe._execution_device == torch.device("meta")


class Own(nn.Linear):
    device = torch.device("meta")


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda p: add_hook_to_module(p.unet.mid_block, AlignDevicesHook(execution_device="meta")),
            id="accelerate",
        ),
        pytest.param(
            lambda p: p.unet.enable_group_offload(torch.device("cpu"), torch.device("cpu"), "leaf_level"),
            id="group-offload",
        ),
        pytest.param(lambda p: p.text_encoder.to("meta"), id="text-encoder-elsewhere"),
        pytest.param(lambda p: p.unet.to("meta"), id="unet-elsewhere"),
        pytest.param(lambda p: setattr(p, "text_encoder", Own(2, 2)), id="own-model"),
        pytest.param(lambda p: setattr(p, "text_encoder", nn.Identity()), id="no-parameters"),
        pytest.param(
            lambda p: setattr(
                p.vae, "post_quant_conv", torch.jit.trace(nn.Conv2d(4, 4, 1).eval(), torch.ones(1, 4, 8, 8))
            ),
            id="torchscript",
        ),
    ],
)
def test_whatever_is_not_plain_is_upstreams_to_decide(pipe, change):
    change(pipe)

    def outcome():
        try:
            return pipe._execution_device
        except AttributeError as error:
            return str(error)

    expected = outcome()
    applied(pipe)
    assert device_fusion._device_without_hooks(pipe) is None
    assert outcome() == expected


def test_a_pipeline_with_a_search_of_its_own_is_left_alone(pipe):
    class Search(StableDiffusionPipeline):
        _execution_device = torch.device("meta")

    own = Search(**pipe.components, requires_safety_checker=False)
    sdfastgn.optimize(own, strict=True)
    assert type(own) is Search
    assert own._execution_device == torch.device("meta")
