"""One training step of a UNet as a workload: forward, mean squared error, backward.

Weights are in the config's dtype and nothing is checkpointed. There is no optimizer, whose state
and time are the same for every variant. Gradients are dropped before each step, as ``zero_grad``
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.bench.models.workload import BenchConfig, Workload, component, step_inputs, workload_of


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes of the tensors that autograd keeps from ``forward`` for the backward, parameters left
    out, shared memory counted once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        # Not the tensor itself: a node that keeps its own output in this way is never freed.
        return tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Bound to a name: what the graph keeps must not be freed, or its addresses would be used again.
        output = forward()
    del output
    return sum(found.values())


def build(config: BenchConfig) -> Workload:
    """One step with fixed latents, timestep, text and noise; ``call`` returns its gradients."""
    unet, scale = component(config, "unet")
    unet.train()
    kwargs = step_inputs(config, unet, scale)
    generator = torch.Generator().manual_seed(config.seed + 3)
    # Inpainting has more channels of input than of output.
    shape = (config.batch, unet.config.out_channels, *kwargs["sample"].shape[2:])
    noise = torch.randn(shape, generator=generator).to(config.torch_device)

    def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return F.mse_loss(model(**inputs, return_dict=False)[0].float(), noise)

    def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.enable_grad():
            loss_of(model, inputs).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def memory() -> tuple[float, float | None]:
        unet.zero_grad()
        saved_mib, step_mib = saved_bytes(lambda: loss_of(unet, kwargs), unet) / 2**20, None
        if config.torch_device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(unet, kwargs)
            step_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        unet.zero_grad()
        return saved_mib, step_mib

    return replace(workload_of(unet, kwargs, step), memory=memory)
