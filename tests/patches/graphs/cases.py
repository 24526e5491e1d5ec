"""CUDA graphs: models beside stock ones, and changes that must show in a model's next call."""

import copy
import functools
import gc
import types

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from peft import LoraConfig
from torch import nn

import sdfastgn
from sdfastgn.models.architectures import build_unet, unet_inputs
from sdfastgn.patches.graphs import install as cuda_graphs
from tests.copies import Original
from tests.patches.cases import ip_adapter_weights
from tests.patches.graphs.tape import TapeBackend

MIB = 2**20
DEVICES = [pytest.param("cpu", id="tape"), pytest.param("cuda", id="graph", marks=pytest.mark.gpu)]


def optimized(model, mode="auto", backend=None, **options):
    """``model`` with CUDA graphs, or on the CPU with tapes in their place. ``options``: of ``optimize``."""
    sdfastgn.optimize(model, cuda_graphs=mode, **options)
    if next(model.parameters()).device.type == "cpu":
        cuda_graphs.install(model, mode, backend or TapeBackend())
    return model


@functools.cache
def built(model, device):
    """A UNet, built once. Tests take copies of it."""
    return build_unet(model, torch.float32, device)


@functools.cache
def original(model, device):
    """``built(model, device)``, of which tests take quick copies."""
    return Original(built(model, device))


def make(device="cpu", mode="auto", model="tiny", backend=None, merge_adapters=True):
    """(optimized UNet, stock UNet with the same weights, arguments)"""
    unet, stock = (original(model, device).copy() for _ in range(2))
    inputs = unet_inputs(model, size=64, batch=1, dtype=torch.float32, device=device, seed=0)
    return optimized(unet, mode, backend, merge_adapters=merge_adapters), stock, inputs


def run(model, inputs, calls=1):
    """Call ``model`` ``calls`` times, and return the last result."""
    with torch.no_grad():
        for _ in range(calls):
            sample = model(**inputs).sample
    return sample


def agree(a, b):
    torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-3)


def same_results(model, stock, inputs, calls):
    for _ in range(calls):
        agree(run(model, inputs), run(stock, inputs))


def state(model):
    """What the report of ``model`` says about its graphs, without the rest of the report."""
    ((graphs, _),) = cuda_graphs.inspect(model)
    return graphs


def settled():
    """Wait until nothing runs, and free all memory that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def reasons_of(model):
    return " | ".join(state(model).eager)


# ---- changes


def nothing(unet):
    pass


def lora(unet):
    torch.manual_seed(5)
    unet.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "conv1"], init_lora_weights=False), adapter_name="a"
    )


def two_loras(unet):
    lora(unet)
    torch.manual_seed(6)
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), adapter_name="b")


def scale_lora(unet):
    for module in unet.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("a", 0.3)


def lora_with_scales_on_the_cpu(unet):
    """A LoRA as after peft's ``prepare_model_for_compiled_hotswap`` and a later move of the model."""
    lora(unet)
    for module in unet.modules():
        if hasattr(module, "scaling"):
            module.scaling["a"] = torch.tensor(module.scaling["a"])


def fill_scales(unet):
    for module in unet.modules():
        if hasattr(module, "scaling"):
            module.scaling["a"].fill_(0.3)


def ip_adapter(unet):
    unet._load_ip_adapter_weights([ip_adapter_weights(unet)])
    unet.to(next(unet.parameters()).device)


def two_ip_adapters(unet):
    unet._load_ip_adapter_weights([ip_adapter_weights(unet), ip_adapter_weights(unet)])
    unet.to(next(unet.parameters()).device)


def ip_adapter_of_two_images(unet):
    ip_adapter(unet)
    ip_adapter_scale(unet, [0.8, 0.9])


def ip_adapter_scale(unet, *scales):
    for processor in unet.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [*scales]


def items_of_ip_adapter_scale(unet, scale):
    for processor in unet.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale[0] = scale


def scaled_weights(unet):
    for p in unet.parameters():
        p.data = p.data * 1.1


def weights_elsewhere(unet):
    """Move weights as ``.to`` another device and back does: to another weight's old address, or its own."""
    kept = [p.data.clone() for p in unet.parameters()]
    for p in unet.parameters():
        p.data = torch.empty(0, device=p.device)
    for p, value in zip(reversed(list(unet.parameters())), reversed(kept), strict=True):
        p.data = value.mul(1.1)


def replaced_parameter(unet):
    unet.conv_out.weight = nn.Parameter(unet.conv_out.weight * 2)


def in_place(unet):
    with torch.no_grad():
        unet.conv_out.weight.mul_(2)


def other_module(unet):
    unet.mid_block.resnets[0].norm1 = copy.deepcopy(unet.mid_block.resnets[0].norm2)


def fewer_modules(unet):
    unet.mid_block.attentions = nn.ModuleList()
    unet.mid_block.resnets = unet.mid_block.resnets[:1]


def circular(unet):
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"


def attention_scale(unet):
    for name, module in unet.named_modules():
        if name.endswith("attn1"):
            module.rescale_output_factor = 0.25


class Doubled(dict):
    """Is equal to a dict of the same numbers, but its items are twice as large."""

    def __getitem__(self, key):
        return 2 * super().__getitem__(key)


def scales_of_another_class(unet):
    for module in unet.modules():
        if hasattr(module, "scaling"):
            module.scaling = Doubled(module.scaling)


def of_pytorch(function):
    """``function`` as if it were written in PyTorch's code, whose functions may be part of a graph."""
    namespace = {**function.__globals__, "__name__": "torch.for_tests"}
    made = types.FunctionType(function.__code__, namespace, None, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def activation(unet, function):
    """Replace an activation by ``function``."""
    block = unet.mid_block.resnets[0]
    del block.nonlinearity
    vars(block)["nonlinearity"] = function


def closure(unet):
    factor = 1.0

    def activate(x):
        return x * factor

    activation(unet, of_pytorch(activate))


def closure_over_a_dict(unet):
    scales = {"factor": 1.0}

    def activate(x):
        return x * scales["factor"]

    activation(unet, of_pytorch(activate))


def keyword_default(unet):
    def activate(x, *, factor=1.0):
        return x * factor

    activation(unet, of_pytorch(activate))


def list_as_default(unet):
    def activate(x, factors=[1.0]):  # noqa: B006
        return x * factors[0]

    activation(unet, of_pytorch(activate))


def keyword_of_a_partial(unet):
    activation(unet, functools.partial(torch.mul, other=1.0))


def method_of_a_tensor(unet):
    activation(unet, torch.ones(1, device=unet.device).mul)


def activation_of(unet):
    return unet.mid_block.resnets[0].nonlinearity


def other_class_of_processor(unet):
    class Silent(AttnProcessor2_0):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return hidden_states * 3

    Silent.__module__ = AttnProcessor2_0.__module__
    for processor in unet.attn_processors.values():
        processor.__class__ = Silent


ACTIVATION = r"mid_block\.resnets\.0\.nonlinearity"
# name -> (before the first call, change, what the report then says): a stale graph would be wrong by much
CHANGES = {
    "lora-load": (nothing, lora, r"module \S+\.(to_q|conv1) changed from torch\.\S+ to peft\.\S+"),
    "lora-scale": (lora, scale_lora, r"LoRA scale of \S+\.(to_q|conv1) changed from [\d.]+ to [\d.]+"),
    "lora-fuse": (
        lora,
        lambda u: u.fuse_lora(lora_scale=3.0),
        r"\S+\.(to_q|conv1)\.merged_adapters changed from \[\] to \['a'\]",
    ),
    "lora-unload": (
        lora,
        lambda u: (u.fuse_lora(), u.unfuse_lora(), u.delete_adapters("a")),
        r"module \S+\.(to_q|conv1)\.lora_\w+\.a was removed",
    ),
    "lora-disable": (
        lora,
        lambda u: u.disable_adapters(),
        r"attribute _disable_adapters of \S+ changed from False to True",
    ),
    "lora-set-adapter": (
        two_loras,
        lambda u: u.set_adapter("a"),
        r"attribute _active_adapter of \S+ changed from \['b'\] to \['a'\]",
    ),
    "lora-hotswap": (
        lora_with_scales_on_the_cpu,
        fill_scales,
        r"LoRA scale of \S+\.(to_q|conv1) changed from [\d.]+ to 0\.3",
    ),
    "lora-scales-of-another-class": (
        lora,
        scales_of_another_class,
        r"attribute scaling of \S+ changed from \{'a': [\d.]+\} to Doubled",
    ),
    "ip-adapter-off": (
        ip_adapter,
        lambda u: ip_adapter_scale(u, 0.0),
        r"attribute scale of \S+\.attn2\.processor changed from \[1\.0\] to \[0\.0\]",
    ),
    "freeu-on": (
        nothing,
        lambda u: u.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6),
        r"attribute s1 of up_blocks\.\d was added",
    ),
    "freeu-off": (
        lambda u: u.enable_freeu(0.9, 0.2, 1.5, 1.6),
        lambda u: u.disable_freeu(),
        r"attribute s1 of up_blocks\.\d changed from 0\.9 to None",
    ),
    "weights-data": (nothing, scaled_weights, r"the (weight|bias) of \S+ has other memory \(.*\)"),
    "weights-elsewhere": (nothing, weights_elsewhere, r"the (weight|bias) of \S+ has other memory \(.*\)"),
    "weights-replaced": (
        nothing,
        replaced_parameter,
        r"parameter weight of conv_out was replaced by another Parameter \(.* or an assignment\)",
    ),
    "weights-assigned": (
        nothing,
        lambda u: u.load_state_dict({k: v * 1.1 for k, v in u.state_dict().items()}, assign=True),
        r"parameter \w+ of \S+ was replaced by another Parameter \(load_state_dict\(assign=True\) .*\)",
    ),
    "module-replaced": (
        nothing,
        other_module,
        r"module mid_block\.resnets\.0\.norm1 was replaced by another \w*GroupNorm",
    ),
    "modules-removed": (
        nothing,
        fewer_modules,
        r"module mid_block\.(attentions|resnets) was replaced by another ModuleList",
    ),
    "attribute": (
        nothing,
        lambda u: setattr(u.mid_block.resnets[0], "output_scale_factor", 2.0),
        r"attribute output_scale_factor of mid_block\.resnets\.0 changed from 1(\.0)? to 2\.0",
    ),
    "eps": (
        nothing,
        lambda u: setattr(u.mid_block.resnets[0].norm1, "eps", 0.5),
        r"attribute eps of mid_block\.resnets\.0\.norm1 changed from 1e-05 to 0\.5",
    ),
    "config-attribute": (
        nothing,
        lambda u: setattr(u.config, "center_input_sample", True),
        r"attribute center_input_sample of config changed from False to True",
    ),
    "circular-padding": (
        nothing,
        circular,
        r"attribute padding_mode of \S+ changed from 'zeros' to 'circular'",
    ),
    "attention-scale": (
        nothing,
        attention_scale,
        r"attribute rescale_output_factor of \S+\.attn1 changed from 1\.0 to 0\.25",
    ),
    "processor-of-another-class": (
        lambda u: u.set_attn_processor(AttnProcessor2_0()),
        other_class_of_processor,
        r"the class of \S+\.processor changed from AttnProcessor2_0 to Silent",
    ),
    "closure": (
        closure,
        lambda u: setattr(activation_of(u).__closure__[0], "cell_contents", 3.0),
        rf"a variable in the closure of {ACTIVATION} changed from 1\.0 to 3\.0",
    ),
    "closure-over-a-dict": (
        closure_over_a_dict,
        lambda u: activation_of(u).__closure__[0].cell_contents.update(factor=3.0),
        rf"{ACTIVATION}\.__closure__\[0\]\['factor'\] changed from 1\.0 to 3\.0",
    ),
    "keyword-default": (
        keyword_default,
        lambda u: activation_of(u).__kwdefaults__.update(factor=3.0),
        rf"{ACTIVATION}\.__kwdefaults__\['factor'\] changed from 1\.0 to 3\.0",
    ),
    "list-as-default": (
        list_as_default,
        lambda u: activation_of(u).__defaults__[0].insert(0, 3.0),
        rf"{ACTIVATION}\.__defaults__\[0\] changed from \[1\.0\] to \[3\.0, 1\.0\]",
    ),
    "keyword-of-a-partial": (
        keyword_of_a_partial,
        lambda u: activation_of(u).keywords.update(other=3.0),
        rf"{ACTIVATION}\.keywords\['other'\] changed from 1\.0 to 3\.0",
    ),
    "method-of-a-tensor": (
        method_of_a_tensor,
        lambda u: setattr(activation_of(u).__self__, "data", torch.full((1,), 3.0, device=u.device)),
        rf"the tensor {ACTIVATION}\.__self__ has other memory \(.*\)",
    ),
    "inner-hook": (
        nothing,
        lambda u: u.mid_block.register_forward_hook(lambda m, i, o: o * 2),
        r"a forward hook of mid_block was added",
    ),
    "inner-forward": (
        nothing,
        lambda u: setattr(u.mid_block, "forward", lambda h, *a, **k: h),
        r"attribute forward of mid_block was added",
    ),
}
# Changes of numbers that a graph reads from memory: name -> (before the first call, change)
VALUES = {
    "freeu": (
        lambda u: u.enable_freeu(0.9, 0.2, 1.5, 1.6),
        lambda u: u.enable_freeu(0.5, 0.7, 1.1, 2),
    ),
    "ip-adapter": (ip_adapter, lambda u: ip_adapter_scale(u, 0.1)),
    "ip-adapter-in-place": (ip_adapter, lambda u: items_of_ip_adapter_scale(u, 0.1)),
    "ip-adapters": (two_ip_adapters, lambda u: ip_adapter_scale(u, 0.1, 0.6)),
    "ip-adapter-with-masks": (ip_adapter_of_two_images, lambda u: ip_adapter_scale(u, [0.1, 0.6])),
}
# Changes of the model that leave a graph right, or right numbers by another way.
HARMLESS = {
    "in-place": in_place,
    "attention-processor": lambda u: u.set_attn_processor(AttnProcessor()),
    "to-double-and-back": lambda u: u.to(torch.float64).to(torch.float32),
    "training-and-back": lambda u: u.train().eval(),
}


def inputs_after(before, inputs):
    """``inputs``, with the arguments that a model needs in addition after ``before``."""
    adapters = {ip_adapter: 1, two_ip_adapters: 2, ip_adapter_of_two_images: 1}.get(before, 0)
    if not adapters:
        return inputs
    device, images = inputs["sample"].device, 1 + (before is ip_adapter_of_two_images)
    generator = torch.Generator().manual_seed(7)
    embeds = [torch.randn(1, images, 24, generator=generator).to(device) for _ in range(adapters)]
    inputs = {**inputs, "added_cond_kwargs": {"image_embeds": embeds}}
    if images > 1:
        masks = torch.rand(1, images, 8, 8, generator=generator).to(device)
        inputs["cross_attention_kwargs"] = {"ip_adapter_masks": [masks]}
    return inputs
