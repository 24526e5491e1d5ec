"""The code on which calls of a model depend: what is noticed when it is replaced, and what is not."""

import copy
import importlib

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch, attention_processor, embeddings, resnet
from diffusers.models.transformers import transformer_flux
from torch import nn
from torch.nn import functional as F

import sdfastgn
from sdfastgn.models.architectures import build_unet, unet_inputs
from sdfastgn.patches.code.guard import Guard
from sdfastgn.patches.code.replaced import OWN, replaced_in
from tests.patches.code.foreign import OF_UNETS, halved, of_package, replaced

NOTICED = [*OF_UNETS, (nn.Module, "_call_impl"), (F, "linear"), (torch, "cat")]
FLUX = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
    "in_channels": 16,
}
pytestmark = pytest.mark.fused_on_cpu
Registry = attention_dispatch._AttentionBackendRegistry


def name_of(case):
    return f"{case[0].__name__}.{case[1]}"


@pytest.fixture(scope="module")
def unet():
    return build_unet("tiny", torch.float32, "cpu")


@pytest.fixture(scope="module")
def flux():
    return diffusers.FluxTransformer2DModel(**FLUX).eval()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("case", NOTICED, ids=name_of)
@pytest.mark.parametrize("is_optimized", [False, True], ids=["stock", "optimized"])
def test_replaced_code_is_noticed(unet, case, is_optimized):
    """Also in an optimized model, whose fused forwards do not run the code."""
    holder, name = case
    with sdfastgn.optimized(unet, missing_ok=True) if is_optimized else torch.no_grad():
        guard = Guard(unet)
        assert guard.same()
        with replaced(holder, name):
            assert not guard.same()
            assert [entry.name for entry in guard.changed()] == [name]
            assert (name in str(replaced_in(Guard(unet).entries))) == (name != "scaled_dot_product_attention")
        assert guard.same()


def test_a_method_that_a_subclass_gets_is_noticed(unet, monkeypatch):
    """Until now the method of its base class ran."""
    guard = Guard(unet)
    monkeypatch.setattr(nn.Conv2d, "__call__", of_package(lambda self, x: x), raising=False)
    assert [entry.words for entry in guard.changed()] == ["torch.nn.modules.conv.Conv2d.__call__"]


@pytest.mark.parametrize("name", ["__code__", "__defaults__", "__kwdefaults__"])
def test_a_changed_function_is_noticed(unet, name):
    function = resnet.ResnetBlock2D.forward
    guard, before = Guard(unet), getattr(function, name)
    values = {
        "__code__": (lambda self, x, temb: x).__code__,
        "__defaults__": (1,),
        "__kwdefaults__": {"a": 1},
    }
    try:
        setattr(function, name, values[name])
        assert [*guard.changed_inside()] == ["the code of diffusers.models.resnet.ResnetBlock2D.forward"]
    finally:
        setattr(function, name, before)
    assert guard.same()


def test_a_changed_closure_is_noticed(monkeypatch):
    factor = 2.0

    def forward(self, x):
        return x * factor

    class Scale(nn.Module):
        pass

    monkeypatch.setattr(Scale, "forward", forward, raising=False)
    guard = Guard(Scale())
    forward.__closure__[[*forward.__code__.co_freevars].index("factor")].cell_contents = 3.0
    assert not guard.same()
    assert len([*guard.changed_inside()]) == 1


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (Registry, "_active_backend", "other"),
        (transformer_flux.FluxAttnProcessor, "__call__", halved(len)),
        (embeddings.apply_rotary_emb, "__code__", (lambda *args, **kwargs: args[0]).__code__),
        (torch.Tensor, "chunk", halved(torch.Tensor.chunk)),
    ],
    ids=["active-backend", "processor", "code-of-rotary-embedding", "method-of-tensors"],
)
def test_flux(flux, holder, name, value, monkeypatch):
    guard = Guard(flux)
    with monkeypatch.context() as patch:
        patch.setattr(holder, name, value)
        assert not guard.same()
    assert guard.same()


def test_another_function_for_an_attention_backend(flux, monkeypatch):
    guard, backend = Guard(flux), Registry._active_backend
    monkeypatch.setitem(Registry._backends, backend, halved(Registry._backends[backend]))
    assert not guard.same()


def test_an_entry_with_a_constant_key_is_noticed():
    options = {"factor": 2.0, "other": 1.0}

    class Scale(nn.Module):
        def forward(self, x):
            return x * options["factor"]

    guard = Guard(Scale())
    options["other"] = 5.0
    assert guard.same()
    options["factor"] = 3.0
    assert not guard.same()


def test_nothing_runs_for_a_guard(unet, monkeypatch):
    """No random numbers, no hook, no call."""
    before = torch.random.get_rng_state()
    handle = unet.mid_block.register_forward_hook(lambda *args: pytest.fail("a hook ran"))
    monkeypatch.setattr(type(unet), "forward", of_package(lambda *args, **kwargs: pytest.fail("it ran")))
    Guard(unet)
    handle.remove()
    assert torch.equal(torch.random.get_rng_state(), before)


def draw(unet):
    inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0)
    with torch.no_grad():
        unet(**inputs)


def backward(unet):
    inputs = unet_inputs("tiny", size=64, batch=1, dtype=torch.float32, device="cpu", seed=0)
    unet(**inputs).sample.sum().backward()
    unet.zero_grad()


def compile_another(unet):
    torch.compile(lambda x: nn.functional.gelu(x) + 1, backend="eager")(torch.ones(3))


def autocast(unet):
    with torch.autocast("cpu", torch.bfloat16):
        draw(unet)


def switches(unet):
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        draw(unet)


def schedule(unet):
    for kind in (
        diffusers.DDIMScheduler,
        diffusers.EulerDiscreteScheduler,
        diffusers.UniPCMultistepScheduler,
    ):
        scheduler = kind()
        scheduler.set_timesteps(2)
        scheduler.step(torch.ones(1, 4, 8, 8), scheduler.timesteps[0], torch.ones(1, 4, 8, 8))


def adapters(unet):
    from peft import LoraConfig

    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), adapter_name="guard")
    draw(unet)
    unet.set_adapters("guard", 0.5)
    unet.delete_adapters("guard")


def freeu(unet):
    unet.enable_freeu(0.9, 0.2, 1.5, 1.6)
    draw(unet)
    unet.disable_freeu()


def optimize_another(unet):
    another = copy.deepcopy(unet)
    sdfastgn.optimize(another)
    draw(another)
    sdfastgn.restore(another)


HARMLESS = [
    draw, backward, compile_another, autocast, switches, schedule, adapters, freeu, optimize_another,
    copy.deepcopy,
    lambda unet: unet.set_attn_processor(attention_processor.AttnProcessor2_0()),
    lambda unet: unet.state_dict(),
    lambda unet: unet.to(torch.float64).to(torch.float32),
    lambda unet: unet.train().eval(),
    lambda unet: torch.manual_seed(3),
    lambda unet: importlib.import_module("diffusers.pipelines.stable_diffusion"),
    lambda unet: importlib.import_module("transformers.models.t5.modeling_t5"),
    lambda unet: diffusers.AutoencoderKL(block_out_channels=(32,)).decode(torch.ones(1, 4, 8, 8)),
]  # fmt: skip


def test_what_users_do_raises_no_alarm(unet):
    guard = Guard(unet)
    for each in HARMLESS:
        each(unet)
        found = [entry.words for entry in guard.changed()], [*guard.changed_inside()]
        assert guard.same(), (each, found)


def test_packages_that_replace_code_without_changing_it(unet):
    """torch._dynamo wraps functions, accelerate those of modules. Nobody is named."""
    assert {"torch", "accelerate", "peft"} <= set(OWN)
    torch.compile(copy.deepcopy(unet), backend="eager")
    compile_another(unet)
    assert replaced_in(Guard(unet).entries) == []


@pytest.mark.parametrize("kind", [diffusers.AutoencoderKL, diffusers.FluxTransformer2DModel, "clip"])
def test_stock_code_is_nobody_elses(kind):
    from transformers import CLIPTextConfig, CLIPTextModel

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = FLUX if kind is diffusers.FluxTransformer2DModel else {}
    model = CLIPTextModel(CLIPTextConfig(**small)) if kind == "clip" else kind(**options)
    assert replaced_in(Guard(model).entries) == []


def test_a_method_of_another_class_is_foreign(unet, monkeypatch):
    """Although the same package wrote it."""
    other = attention_processor.AttnProcessor.__call__
    monkeypatch.setattr(attention_processor.AttnProcessor2_0, "__call__", other)
    unet.set_attn_processor(attention_processor.AttnProcessor2_0())
    assert replaced_in(Guard(unet).entries) == [
        "diffusers.models.attention_processor.AttnProcessor2_0.__call__"
    ]
