"""Parts of a model that pipelines switch during an image: there is a graph for each state."""

import copy

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention import GatedSelfAttentionDense

from sdfastgn.models.architectures import randomize, unet_inputs
from sdfastgn.models.configurations import UNETS
from tests.patches.graphs.cases import agree, optimized, run, state
from tests.patches.graphs.tape import TapeBackend

pytestmark = pytest.mark.fused_on_cpu


def switch(unet, enabled):
    """As ``enable_fuser`` of GLIGEN's pipelines."""
    for module in unet.modules():
        if type(module) is GatedSelfAttentionDense:
            module.enabled = enabled


def gligen(backend=None):
    """(optimized UNet with GLIGEN's attention to objects, stock UNet with the same weights, arguments)"""
    stock = randomize(UNet2DConditionModel(**{**UNETS["tiny"], "attention_type": "gated"}), 0).eval()
    inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0)
    width = stock.config.cross_attention_dim
    objects = {"boxes": torch.rand(1, 3, 4), "positive_embeddings": torch.rand(1, 3, width)}
    inputs["cross_attention_kwargs"] = {"gligen": {**objects, "masks": torch.ones(1, 3)}}
    return optimized(copy.deepcopy(stock), backend=backend), stock, inputs


@pytest.mark.slow
def test_images_with_gligen_are_captured_once():
    unet, stock, inputs = gligen()
    outputs = []
    for _ in range(3):
        for enabled in (True, False):
            switch(unet, enabled), switch(stock, enabled)
            for _ in range(3):
                found = run(unet, inputs)
                agree(found, run(stock, inputs))
            outputs.append(found)
    assert not torch.equal(outputs[0], outputs[1])
    assert (state(unet).captured, state(unet).replays) == (2, 16)


def test_a_switch_while_a_call_is_captured():
    """The graph has the new state. It must not serve calls with the old one."""

    class Switching(TapeBackend):
        def capture(self, fn, pool=None):
            if not captures:
                switch(unet, False)
            captures.append(fn)
            return super().capture(fn, pool)

    captures = []
    unet, stock, inputs = gligen(Switching())
    run(unet, inputs, calls=2)
    assert captures
    switch(unet, True)
    for _ in range(3):
        agree(run(unet, inputs), run(stock, inputs))
