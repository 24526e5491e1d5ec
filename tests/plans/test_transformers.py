"""Which transformers get plans from ``optimize``, and that they compute what stock computes."""

import copy

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    StableDiffusion3Pipeline,
)
from torch import nn
from torch.utils import _pytree as pytree
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

import sdfastgn
from sdfastgn.patches.swap.instance_entries import InstanceEntry
from sdfastgn.plans.install import gets_plans
from sdfastgn.plans.run.bake import Baked
from tests.kernels.samples import kernels
from tests.plans.engine import forward_of as planned
from tests.plans.engine import plan_of
from tests.plans.models import CALLS
from tests.plans.programs import relative

pytestmark = [pytest.mark.fused_on_cpu, pytest.mark.usefixtures("without_gradients")]

TOLERANCE = 1e-5
CALL = {call.cls: call._replace(method="__call__") for call in CALLS if call.method == "forward"}
PLANNED = [
    *("FluxTransformer2DModel", "Flux2Transformer2DModel", "ChromaTransformer2DModel"),
    *("SD3Transformer2DModel", "QwenImageTransformer2DModel", "ZImageTransformer2DModel"),
    *("LTXVideoTransformer3DModel", "WanTransformer3DModel", "HunyuanVideoTransformer3DModel"),
    *("CogView4Transformer2DModel", "CosmosTransformer3DModel"),
    *("CogVideoXTransformer3DModel", "Krea2Transformer2DModel"),  # their norms have parameters
]
# Steps that some of them must have, by model.
STEPS = {
    "FluxTransformer2DModel": {"add_linear_": 1},
    "Flux2Transformer2DModel": {"add_linear_": 1, "gated": 3},
    "ChromaTransformer2DModel": {"add_linear_": 1},
    "ZImageTransformer2DModel": {"gated": 4},
    "WanTransformer3DModel": {"rotate": 4},
    "CogView4Transformer2DModel": {"join_heads": 4},
    "CosmosTransformer3DModel": {"rotate": 8},
    "CogVideoXTransformer3DModel": {"ada_norm": 10},
}


def agree(call, model, stock, seed):
    found, expected = (call.run(each, **call.drawn(seed)) for each in (model, stock))
    assert max(map(relative, found, expected)) <= TOLERANCE


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", PLANNED)
def test_the_whole_model_is_one_plan(name):
    call = CALL[name]
    model = call.model()
    stock = copy.deepcopy(model)
    sdfastgn.optimize(model)
    for seed in range(3):  # in its first call, a model may compute tables that it keeps
        agree(call, model, stock, seed)
    (found,) = [each for each in sdfastgn.report(model).plans if not each.path]
    assert found.plans == 1
    assert found.calls
    assert found.steps["ada_norm"] >= 3
    assert STEPS.get(name, {}).items() <= found.steps.items()
    twin = copy.deepcopy(model)
    agree(call, twin, stock, 2)
    assert planned(twin).calls
    sdfastgn.restore(model)
    entries = [vars(part).get("forward") for part in model.modules()]
    assert not any(isinstance(entry, InstanceEntry) for entry in entries)
    same = (call.run(each, **call.drawn(3)) for each in (model, stock))
    assert all(map(torch.equal, *same))


# Name of a model -> launches for each of its attentions. Six parts of queries, keys and values are written
# into their places. Where text and image are one tensor, two of queries and keys are, or their four parts.
JOINT = {
    "FluxTransformer2DModel": (6, 2),
    "Flux2Transformer2DModel": (6, 2),
    "ChromaTransformer2DModel": (6, 2),
    "QwenImageTransformer2DModel": (6, 6),
    "SD3Transformer2DModel": (6, 2, 6),
    "HunyuanVideoTransformer3DModel": (6, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINT)
def test_heads_of_joint_attention_take_one_pass(name, launches):
    launches.runs = True
    call = CALL[name]
    model = call.model()
    call.run(model, **call.drawn(0))  # some models keep tables from their first call
    plan = plan_of(model, lambda **inputs: call.run(model, **inputs), **call.drawn(0))
    assert not any(s.target == "channel_norm" or (s.target == "cat" and len(s.shape) > 3) for s in plan.steps)
    inputs = [t for t in pytree.tree_leaves(call.drawn(1)) if isinstance(t, torch.Tensor)]
    baked = Baked(plan)
    with kernels(direct=True):
        found = baked.run([*inputs])
        launches.clear()
        again = baked.run([*inputs])
    assert [kernel for kernel, *_ in launches].count("rotate") == sum(JOINT[name])
    assert max(map(relative, found, call.run(model, **call.drawn(1)))) <= TOLERANCE
    assert baked.recorded == 1
    assert all(map(torch.equal, found, again))


def test_blocks_have_plans_where_the_model_reads_values():
    """A model asks for the lengths of its prompts, so it cannot be traced."""
    call = CALL["Lumina2Transformer2DModel"]
    model = call.model()
    stock = copy.deepcopy(model)
    sdfastgn.optimize(model)
    for seed in range(3):
        agree(call, model, stock, seed)
    calls = {each.path: each.calls for each in sdfastgn.report(model).plans if each.calls}
    assert {"noise_refiner.0", "layers.0", "layers.1"} <= calls.keys()
    assert "" not in calls


def test_a_first_call_that_fills_tables_makes_no_plans_inside():
    call = CALL["ZImageTransformer2DModel"]
    model = call.model()
    stock = copy.deepcopy(model)
    sdfastgn.optimize(model)
    agree(call, model, stock, 0)
    assert model.rope_embedder.freqs_cis is not None
    assert planned(model).own
    agree(call, model, stock, 1)
    found = {each.path: each for each in sdfastgn.report(model).plans}
    whole = found.pop("")
    assert (whole.traces, whole.plans, whole.calls, whole.last_change) == (2, 1, 1, "")
    assert not sum(each.traces for each in found.values())


def test_changes_of_the_model_are_noticed():
    call = CALL["FluxTransformer2DModel"]
    model = call.model()
    sdfastgn.optimize(model)
    stock = copy.deepcopy(model)
    sdfastgn.restore(stock)
    agree(call, model, stock, 0)
    for each in (model, stock):
        each.transformer_blocks[0].norm1.norm.eps = 0.5
        each.proj_out.weight.data = each.proj_out.weight.data * 2
    for seed in (1, 2, 3):
        agree(call, model, stock, seed)
    assert (planned(model).calls, planned(model).own) == (4, {})
    assert "eps" in planned(model).last_change


def test_text_encoders_stay_as_they_are():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 20}
    clip = CLIPTextModel(CLIPTextConfig(intermediate_size=16, **sizes))
    t5 = T5EncoderModel(T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    assert not gets_plans(clip)
    assert not gets_plans(t5)


class Step(nn.Sequential):
    """A step of an image."""

    def forward(self, x, timestep):
        return super().forward(x)


@pytest.mark.parametrize("of", [nn.Sequential, Step])
@pytest.mark.parametrize("has_parameters", [False, True])
@pytest.mark.parametrize(
    ("more", "stays"),  # None: it stays one if it takes a time
    [
        (nn.Conv2d(3, 1, 3), None),  # 27 weights beside 512
        (nn.Conv2d(4, 4, 3), False),
        (nn.Embedding(100, 8), False),
    ],
)
def test_what_a_transformer_is(of, has_parameters, more, stays):
    norm = nn.LayerNorm(8, elementwise_affine=has_parameters)
    model = of(nn.Conv2d(3, 8, 2, stride=2), norm, nn.Linear(8, 64))
    is_one = of is Step or not has_parameters
    assert gets_plans(model) is is_one
    assert gets_plans(model.append(more)) is (of is Step if stays is None else stays)


def autoencoder():
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    return AutoencoderKL(**blocks, block_out_channels=(8,), norm_num_groups=4, latent_channels=4).eval()


def flux(transformer):
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), autoencoder(), None, None, None, None, transformer)
    pipe.vae.register_to_config(shift_factor=0.1, scaling_factor=0.5)
    return pipe, {"guidance_scale": 1.0}


def sd3(transformer):
    pipe = StableDiffusion3Pipeline(
        transformer, FlowMatchEulerDiscreteScheduler(), autoencoder(), None, None, None, None, None, None
    )
    pipe.vae.register_to_config(shift_factor=0.1, scaling_factor=0.5)
    negative = torch.randn(1, 7, 24), torch.randn(1, 24)
    return pipe, dict(zip(("negative_prompt_embeds", "negative_pooled_prompt_embeds"), negative, strict=True))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("make", "name", "channels"),
    [(flux, "FluxTransformer2DModel", 16), (sd3, "SD3Transformer2DModel", 4)],
)
def test_a_whole_pipeline(make, name, channels):
    call = CALL[name]
    settings = {**call.settings, "in_channels": channels}
    transformer = call._replace(settings=settings).model()
    pipe, options = make(transformer)
    pipe.set_progress_bar_config(disable=True)
    prompt = {"prompt_embeds": torch.randn(1, 7, 24), "pooled_prompt_embeds": torch.randn(1, 24)}

    def image():
        generator = torch.Generator().manual_seed(0)
        size = {"height": 16, "width": 16, "num_inference_steps": 3, "output_type": "pt"}
        return pipe(**prompt, **options, **size, generator=generator).images

    before = image()
    assert before.std() > 0.02
    sdfastgn.optimize(pipe)
    for _ in range(2):
        torch.testing.assert_close(image(), before, atol=1e-4, rtol=1e-3)
    found = {each.path: (each.plans, each.calls) for each in sdfastgn.report(pipe).plans if each.calls}
    assert found == {"transformer": (1, 6), "vae.decoder": (1, 2)}
    sdfastgn.restore(pipe)
    assert torch.equal(image(), before)
