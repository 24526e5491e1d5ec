"""What users do to a transformer between two calls, as random events.

An event is a function of a model and a ``random.Random``. With equal ones it does the same to two equal
models. It returns False if it does not apply to the model as it is.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.utils.hotswap import hotswap_adapter_from_state_dict
from torch import nn

from tests.patches.transformers import FEW, add_lora

Event = Callable[[Any, random.Random], Any]
EVENTS: dict[str, Event] = {}
NAMES = ("a", "b", "c")
# The dtypes that a model gets, as often as they occur.
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


def event(function: Event) -> Event:
    EVENTS[function.__name__] = function
    return function


def adapters(model: Any) -> list[str]:
    return sorted(getattr(model, "peft_config", {}))


def layers(model: Any) -> list[Any]:
    """The layers that have adapters."""
    return [module for module in model.modules() if hasattr(module, "set_scale")]


def is_fused(model: Any) -> bool:
    return any(layer.merged_adapters for layer in layers(model))


def drawn(choices: Any, chance: random.Random) -> Any:
    return chance.choice(list(choices))


def factor(chance: random.Random) -> float:
    return chance.choice((0.6, 0.8, 1.25, 1.6))


# ---- adapters


@event
def add_adapter(model, chance):
    new = [name for name in NAMES if name not in adapters(model)]
    if not new or is_fused(model):
        return False
    targets = chance.choice((None, FEW, ["to_k", "to_q"]))
    options = {"r": chance.choice((1, 3)), "use_dora": chance.random() < 0.1}
    return add_lora(model, new[0], chance.randrange(100), targets, **options)


def half_as_strong(model, name):
    """The weights of an adapter of ``model``, halved."""
    return {key: value / 2 for key, value in get_peft_model_state_dict(model, adapter_name=name).items()}


@event
def load_lora_adapter(model, chance):
    """Another adapter with half the weights of one that is there."""
    names = adapters(model)
    new = [name for name in NAMES if name not in names]
    if not names or not new or is_fused(model) or any(c.use_dora for c in model.peft_config.values()):
        return False
    return model.load_lora_adapter(half_as_strong(model, names[0]), adapter_name=new[0], prefix=None)


@event
def hotswap(model, chance):
    names = [name for name in adapters(model) if not model.peft_config[name].use_dora]
    if not names or is_fused(model):
        return False
    name = drawn(names, chance)
    weights = {key: value / 2 for key, value in model.state_dict().items() if f".{name}." in key}
    return hotswap_adapter_from_state_dict(model, weights, name, model.peft_config[name])


@event
def set_adapters(model, chance):
    names = [name for name in adapters(model) if chance.random() < 0.7]
    if not names or is_fused(model):
        return False
    return model.set_adapters(names, [chance.choice((-0.5, 0.3, 1.0)) for _ in names])


@event
def set_scale(model, chance):
    names = adapters(model)
    if not names or is_fused(model):
        return False
    name, scale = drawn(names, chance), factor(chance)
    return [layer.set_scale(name, scale) for layer in layers(model)]


@event
def disable_adapters(model, chance):
    return model.disable_adapters() if adapters(model) and not is_fused(model) else False


@event
def enable_adapters(model, chance):
    return model.enable_adapters() if adapters(model) and not is_fused(model) else False


@event
def fuse_lora(model, chance):
    if not adapters(model) or is_fused(model):
        return False
    return model.fuse_lora(lora_scale=factor(chance))


@event
def unfuse_lora(model, chance):
    return model.unfuse_lora() if is_fused(model) else False


@event
def delete_adapters(model, chance):
    names = adapters(model)
    return model.delete_adapters(drawn(names, chance)) if names and not is_fused(model) else False


@event
def unload_lora(model, chance):
    return model.unload_lora() if adapters(model) else False


# ---- weights


def weight(model, chance, *, in_lora=False):
    names = [name for name, p in model.named_parameters() if p.dim() == 2 and (".lora_" in name) == in_lora]
    return model.get_parameter(drawn(names, chance)) if names else None


@event
@torch.no_grad()
def written_in_place(model, chance):
    weight(model, chance).mul_(factor(chance))


@event
@torch.no_grad()
def adapter_written_in_place(model, chance):
    found = weight(model, chance, in_lora=True)
    return False if found is None else found.mul_(factor(chance))


@event
def written_through_data(model, chance):
    found = weight(model, chance, in_lora=chance.random() < 0.5)
    return False if found is None else found.data.mul_(factor(chance))


@event
def other_memory(model, chance):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.95


@event
def other_parameter(model, chance):
    found = weight(model, chance)
    for module in model.modules():
        if vars(module)["_parameters"].get("weight") is found:
            module.weight = nn.Parameter(found.detach() * factor(chance), requires_grad=found.requires_grad)


@event
def load_state_dict(model, chance):
    values = {name: value * 0.95 for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=chance.random() < 0.5)


@event
def to_dtype(model, chance):
    model.to(chance.choice(DTYPES))


@event
def to_dtype_and_back(model, chance):
    model.to(torch.bfloat16).to(torch.float32)


# ---- code


@event
def attention_backend(model, chance):
    if any(not hasattr(each, "_attention_backend") for each in processors(model)):
        return False
    return model.set_attention_backend(chance.choice(("native", "_native_math")))


def processors(model):
    return [module.processor for module in model.modules() if hasattr(module, "processor")]


@event
def other_processor(model, chance):
    """Each layer of attention gets a new processor of its class."""
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor = copy.copy(module.processor)


def half_as_large(module, args, result):
    return result / 2


def linear(model, chance):
    found = [m for m in model.modules() if type(m) is nn.Linear]
    return drawn(found, chance)


@event
def add_hook(model, chance):
    linear(model, chance).register_forward_hook(half_as_large)


@event
def remove_hooks(model, chance):
    hooks = [
        (m._forward_hooks, key)
        for m in model.modules()
        for key, hook in m._forward_hooks.items()
        if hook is half_as_large
    ]
    return [hooks_of.pop(key) for hooks_of, key in hooks] or False


@event
def other_eps(model, chance):
    norms = [module for module in model.modules() if isinstance(getattr(module, "eps", None), float)]
    drawn(norms, chance).eps = chance.choice((1e-6, 0.1))


@event
def other_module(model, chance):
    paths = [path for path, m in model.named_modules() if type(m) is nn.Linear and ".lora_" not in path]
    path = drawn(paths, chance)
    layer = copy.deepcopy(model.get_submodule(path))
    layer.weight.data.mul_(factor(chance))
    model.set_submodule(path, layer)


@event
def training_and_back(model, chance):
    model.train().eval()


@event
def requires_grad(model, chance):
    model.requires_grad_(chance.random() < 0.5)
