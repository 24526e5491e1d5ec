"""Packs the weights of linear layers that read the same tensor, so that one matrix product computes them all.

The parameters are moved side by side into one allocation. Each parameter stays the same object and stays
contiguous. Its storage object is a separate one, which covers only its slice of the allocation. So code that
looks for parameters with a common storage finds none: ``torch.save`` and pickle write each parameter
separately, and accelerate's ``save_model``, which saves only one parameter of each storage, saves them all.

At each call of the model, ``joined`` checks that all parameters are still in the allocation, and returns a
view of the allocation as the joined weight. So a write into a parameter takes effect. ``joined`` also notices
that a parameter was moved (``.to()``, ``param.data = ...``, ``load_state_dict(assign=True)``, offloading).
Only a weak reference to the allocation is kept, so the allocation is freed with the last parameter in it.

The model's own parameters are never packed during a call of the model. Packing frees their old memory, and a
CUDA graph that was captured earlier would still read it. New merged weights of adapters may be packed then,
because no graph reads them yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import is_alone, revived
from sdfastgn.patches.core.fusion import is_unhooked

__all__ = ["Parameters", "is_one_product", "joined", "pack", "plain_parameters", "unpack"]

# Types of device on which weights are packed. One large matrix product keeps a GPU busier than three small
# ones. A small product already keeps a CPU busy, so packing would not be faster there.
PACKED_DEVICES = ("cuda",)
# Bytes. Matrix products read 16 bytes at once, so each parameter must begin at an address divisible by 16.
_ALIGNMENT = 16

# Module that owns the linear layers -> weak reference to the allocation with their weights. The reference is
# not kept in the module's ``__dict__``, so that it is neither copied nor pickled.
_allocations: weakref.WeakKeyDictionary[nn.Module, StorageWeakRef] = weakref.WeakKeyDictionary()


class Parameters(NamedTuple):
    """Weights and biases of several linear layers, in order. ``biases`` is empty if no layer has one."""

    weights: list[Tensor]
    biases: list[Tensor]


def plain_parameters(linears: Sequence[Any]) -> Parameters | None:
    """The parameters of ``linears``.

    None if a layer is no ``nn.Linear`` or has hooks, or if some of the layers have a bias and others do not.
    """
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for linear in linears:
        if type(linear) is not nn.Linear:
            return None
        parameters = linear._parameters  # faster than ``linear.weight``, which takes a microsecond
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None:
            return None
        weights.append(weight)
        if bias is not None:
            biases.append(bias)
    return Parameters(weights, biases) if len(biases) in (0, len(weights)) and is_unhooked(*linears) else None


def is_one_product(x: Tensor, parameters: Parameters) -> bool:
    """True if one product of x with the joined ``parameters`` gives the same result as calling each layer."""
    params = (*parameters.weights, *parameters.biases)
    first = params[0]
    return (
        x.dtype == first.dtype
        and not (torch.is_grad_enabled() and dispatch.wants_gradient(x, params))
        and dispatch.is_untraced(x, params)
        and x.shape[-1] == first.shape[-1]
        and not dispatch.is_autocast(x)
    )


def joined(owner: nn.Module, parameters: Parameters) -> tuple[Tensor, Tensor | None] | None:
    """Returns (all weights concatenated, all biases concatenated), as views of the allocation of ``owner``.

    A linear layer with this weight and bias computes the concatenated results of all layers. The bias is None
    if the layers have no biases. Returns None instead of the pair if the parameters are not side by side in
    the allocation.
    """
    allocation = _allocation(owner)
    if allocation is None:
        return None
    weight = _span(allocation, parameters.weights)
    bias = _span(allocation, parameters.biases) if parameters.biases else None
    if weight is None or (parameters.biases and bias is None):
        return None
    return weight, bias


def _allocation(owner: nn.Module) -> torch.UntypedStorage | None:
    reference = _allocations.get(owner)
    return None if reference is None else revived(reference)


def _span(allocation: torch.UntypedStorage, parts: list[Tensor]) -> Tensor | None:
    """One tensor that covers all ``parts``; None if they are not side by side in ``allocation``."""
    first = parts[0]
    dtype, shape, size = first.dtype, first.shape, first.nbytes
    columns = shape[1:]
    start = end = first.data_ptr()
    rows = 0
    for part in parts:
        if part.data_ptr() != end or part.dtype != dtype or not part.is_contiguous():
            return None
        own = part.shape
        if own == shape:  # the usual case, without the slice ``own[1:]``, which takes CPU time
            end += size
        elif own[1:] == columns:
            end += part.nbytes
        else:
            return None
        rows += own[0]
    offset = start - allocation.data_ptr()
    if first.device != allocation.device or offset < 0 or offset + end - start > allocation.nbytes():
        return None
    return first.new_empty(0).set_(allocation, offset // first.itemsize, (rows, *columns), (*columns, 1))


def pack(owner: nn.Module, linears: Sequence[Any]) -> None:
    """Put the parameters of ``linears``, which are layers of ``owner``, side by side if possible.

    The parameters keep their values and strides, and stay the same objects. If one of them is quantized,
    offloaded or shares its storage (tied weights, a state_dict that other code keeps), no parameter is moved.
    """
    parameters = plain_parameters(linears)
    if parameters is None:
        return
    parts = [*parameters.weights, *parameters.biases]
    captures = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
    must_stay = captures or not dispatch.is_untraced(parts[0], tuple(parts))
    if must_stay or joined(owner, parameters) is not None:
        return
    if len(set(parts)) == len(parts) and all(_fits(part, parts[0]) for part in parts):
        try:
            _allocations[owner] = StorageWeakRef(_move(parts))
        except torch.OutOfMemoryError:
            return  # there is no memory for the allocation, so each layer stays a separate product


def _fits(part: Tensor, first: Tensor) -> bool:
    return (
        part.device.type in PACKED_DEVICES
        and (part.device, part.dtype) == (first.device, first.dtype)
        and part.is_contiguous()
        and part.nbytes % _ALIGNMENT == 0
        and is_alone(part)
        and not part.is_inference()
    )


def _move(parts: list[Tensor]) -> torch.UntypedStorage:
    """Move ``parts`` into a new allocation, and return it. If an exception is raised, no part was moved."""
    # Inference mode is off: a parameter whose memory was allocated in it would become an inference tensor.
    with torch.inference_mode(False), torch.no_grad():
        size = sum(part.nbytes for part in parts)
        allocation = torch.empty(size, dtype=torch.uint8, device=parts[0].device).untyped_storage()
        moved: list[Tensor] = []
        end = 0
        for part in parts:
            start, end = end, end + part.nbytes
            place = part.new_empty(0).set_(allocation[start:end], 0, part.shape, part.stride())
            moved.append(place.copy_(part))
        for part, place in zip(parts, moved, strict=True):
            part.data = place
    return allocation


def unpack(owner: nn.Module) -> None:
    """Undoes ``pack``: each parameter of ``owner`` in the common allocation gets memory of its own again."""
    allocation = _allocation(owner)
    if allocation is not None:
        start, end = allocation.data_ptr(), allocation.data_ptr() + allocation.nbytes()
        with torch.inference_mode(False), torch.no_grad():
            for parameter in owner.parameters():
                if parameter.device == allocation.device and start <= parameter.data_ptr() < end:
                    parameter.data = parameter.data.clone()
    # This comes last: if an interrupt stops the loop, another call still finds the allocation and goes on.
    _allocations.pop(owner, None)
