"""One training step of a UNet as a workload: forward, mean squared error against noise, backward;
judged by its gradients.

Weights are in the config's dtype and nothing is checkpointed. There is no optimizer, whose state
and time are the same for every variant. Gradients are dropped before each step, as ``zero_grad``
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdfastgn.bench.models.workload import (
    ERROR_BOUNDS,
    GRADIENT_FACTOR,
    BenchConfig,
    Judgement,
    Workload,
    component,
    in_fp32,
    step_inputs,
    to_fp32,
)


@dataclass(frozen=True)
class Gradients:
    """Gradients by parameter. Compared as one long vector, one parameter after the other: SDXL has
    2.6 billion values."""

    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Gradients:
        """Those that the parameters hold now, not copied."""
        return cls({name: p.grad for name, p in model.named_parameters() if p.grad is not None})

    def kept(self) -> Gradients:
        """A copy in the CPU's memory: what is held on the GPU is what is measured."""
        return Gradients({name: t.detach().to("cpu", copy=True) for name, t in self.tensors.items()})

    def relative_error(self, reference: Gradients) -> float:
        """||g - reference|| / ||reference|| in fp64; nan if anything is, or where they are not of
        the same parameters."""
        if self.tensors.keys() != reference.tensors.keys():
            return float("nan")
        difference = norm = 0.0
        for name, tensor in self.tensors.items():
            expected = reference.tensors[name].to(tensor.device).double()
            difference += float((tensor.double() - expected).square().sum())
            norm += float(expected.square().sum())
        return (difference / norm) ** 0.5 if norm else float("nan")

    def problem(self) -> str:
        """Why nothing can be compared with these; empty where they will do."""
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values()):
            return "stock eager's own gradients are not finite, so nothing can be compared with them"
        if not any(bool(tensor.any()) for tensor in self.tensors.values()):
            return "stock eager's own gradients are zero, so nothing can be compared with them"
        return ""


def judge(config: BenchConfig, gradients: Gradients, reference: Gradients, limit: float) -> Judgement:
    """Against stock fp32 gradients; ``limit`` is what :func:`error_limit` made of stock eager's own
    error."""
    error = gradients.relative_error(reference)
    # `not <=` because a NaN is neither above nor below.
    reason = f"the gradients' relative error {error:.3g} against fp32 is above {limit:.3g}"
    return Judgement(error, None, "" if error <= limit else reason)


def error_limit(config: BenchConfig, stock_error: float) -> float:
    """Largest relative error against fp32, where stock eager's own is ``stock_error``: next to
    nothing in fp32 without TF32."""
    least = ERROR_BOUNDS["fp32"] if config.dtype == "fp32" else 0.0
    return max(GRADIENT_FACTOR * stock_error, least)


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
        # Bound to a name: what the graph keeps must not be freed, or its addresses would be used
        # again.
        output = forward()
    del output
    return sum(found.values())


def _drop_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def build(config: BenchConfig) -> Workload:
    """One step with fixed latents, timestep, text and noise; ``call`` returns its
    :class:`Gradients`."""
    unet, scale = component(config, "unet")
    unet.train()
    kwargs = step_inputs(config, unet, scale)
    generator = torch.Generator().manual_seed(config.seed + 3)
    # Inpainting has more channels of input than of output.
    shape = (config.batch, unet.config.out_channels, *kwargs["sample"].shape[2:])
    noise = torch.randn(shape, generator=generator).to(config.torch_device)

    def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return F.mse_loss(model(**inputs, return_dict=False)[0].float(), noise)

    def step(model: nn.Module, inputs: dict[str, Any]) -> Gradients:
        _drop_gradients(model)
        with torch.enable_grad():
            loss_of(model, inputs).backward()
        return Gradients.of(model)

    def fp32_gradients() -> Gradients:
        _drop_gradients(unet)
        return in_fp32(unet, lambda exact: step(exact, to_fp32(kwargs)).kept())

    def memory() -> dict[str, float | None]:
        _drop_gradients(unet)
        saved = saved_bytes(lambda: loss_of(unet, kwargs), unet)
        values: dict[str, float | None] = {"saved_mib": saved / 2**20}
        if config.torch_device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(unet, kwargs)
            values["step_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        _drop_gradients(unet)
        return values

    return Workload(unet, lambda: step(unet, kwargs), fp32_gradients, memory)
