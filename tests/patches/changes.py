"""Changes that users make to a linear layer, which is given by its path. Each changes the output."""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

# --- the layer stays a plain one, with other numbers ----------------------------------------------


@torch.no_grad()
def in_place(module, path):
    module.get_submodule(path).weight.mul_(-1.5)


def through_data(module, path):
    for p in module.get_submodule(path).parameters():
        p.data += 0.3


def loaded(module, path):
    layer = module.get_submodule(path)
    layer.load_state_dict({k: v * 1.5 + 0.1 for k, v in layer.state_dict().items()})


@torch.no_grad()
def merged_lora(module, path, *, safely=False):
    lora(module, path)
    layer = module.get_submodule(path)
    layer.merge(safe_merge=safely)
    module.set_submodule(path, layer.base_layer)


WRITTEN = [in_place, through_data, loaded, merged_lora]


def replaced_data(module, path):
    weight = module.get_submodule(path).weight
    weight.data = weight.data * 2


def replaced_parameter(module, path):
    layer = module.get_submodule(path)
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def assigned(module, path):
    layer = module.get_submodule(path)
    layer.load_state_dict({k: v * 1.5 for k, v in layer.state_dict().items()}, assign=True)


def merged_safely(module, path):
    merged_lora(module, path, safely=True)


# Their memory is another.
MOVED = [replaced_data, replaced_parameter, assigned, merged_safely]


# --- it is not plain, and has to be called --------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Quantized(Tensor):
    """A parameter of another class, such as torchao's quantized weights."""


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def hooked(module, path):
    module.get_submodule(path).register_forward_hook(lambda m, i, y: y + 1)


def pre_hooked(module, path):
    module.get_submodule(path).register_forward_pre_hook(lambda m, i: (i[0] * 3,))


def overridden(module, path):
    layer = module.get_submodule(path)
    forward = layer.forward
    layer.forward = lambda x: forward(x).neg()


def subclass(module, path):
    module.get_submodule(path).__class__ = Doubled


def parametrized(module, path):
    parametrize.register_parametrization(module.get_submodule(path), "weight", Half())


def quantized(module, path):
    layer = module.get_submodule(path)
    layer.weight = nn.Parameter((layer.weight.detach() * 2).as_subclass(Quantized))


def lora(module, path):
    torch.manual_seed(5)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=[path], init_lora_weights=False)
    inject_adapter_in_model(config, module)


NOT_PLAIN = [hooked, pre_hooked, overridden, subclass, parametrized, quantized, lora]
