"""Code that writes into weights. PyTorch counts some of these writes in ``_version``, and others not."""

import functools

import torch
from diffusers.training_utils import EMAModel


def by_optimizer(kind, parameters, **options):
    optimizer = kind(parameters, lr=0.05, **options)
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.empty_like(parameter).copy_(values)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


class ThroughData(torch.optim.Optimizer):
    """SGD that writes through ``.data``, as Prodigy and other optimizers do."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.data, alpha=-group["lr"])


def by_average(parameters):
    average = EMAModel(parameters)
    for shadow in average.shadow_params:
        shadow.mul_(-0.5).add_(0.1)
    average.copy_to(parameters)


def _optimizer(kind, **options):
    return lambda parameters: by_optimizer(kind, parameters, **options)


# Each changes all parameters in the list that it gets.
WRITERS = {
    f"{kind.__name__}-{name}": _optimizer(kind, **own, **options)
    for kind, own in ((torch.optim.AdamW, {"eps": 1e-4}), (torch.optim.SGD, {}))  # 1e-8 is 0 in fp16
    for name, options in {
        "plain": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }.items()
}
WRITERS["through-data"] = functools.partial(by_optimizer, ThroughData)
WRITERS["copy_to"] = by_average
