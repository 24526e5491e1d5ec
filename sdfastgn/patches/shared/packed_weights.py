"""Linear layers that read the same tensor, as one matrix product: parameters packed in one allocation.

Each parameter stays what it was: the same object, contiguous, alone in a storage of exactly its size.
These storages are slices of one allocation, so the addresses follow each other. Code that looks for
parameters in one storage finds none: ``torch.save`` and pickle write each by itself, and accelerate's
``save_model``, which keeps one parameter of each storage, drops none.

The joined tensor is not kept. Each call makes it over the allocation, if all parameters still lie where
they were put. So writes into a parameter are seen, and one that was moved (``.to()``,
``param.data = ...``, ``load_state_dict(assign=True)``, offloading) is noticed. The allocation is
referred to weakly, and lives as long as any of the parameters in it.

Nothing is packed while a model computes: a CUDA graph that was captured before would go on reading
memory that packing has given up.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import is_alone, revived
from sdfastgn.patches.core.fusion import is_unhooked

__all__ = ["Parameters", "is_one_product", "joined", "pack", "plain_parameters", "unpack"]

# One product instead of three fills a GPU better; a CPU is full either way.
PACKED_DEVICES = ("cuda",)
# Bytes: matrix products read 16 at a time, so every part must begin at a multiple.
_ALIGNMENT = 16

# By the module whose linear layers they are. In no __dict__: nothing to copy, pickle or take away
# again.
_allocations: weakref.WeakKeyDictionary[nn.Module, StorageWeakRef] = weakref.WeakKeyDictionary()


class Parameters(NamedTuple):
    """Those of several linear layers, in their order. ``biases`` is empty if no layer has one."""

    weights: list[Tensor]
    biases: list[Tensor]


def plain_parameters(linears: Iterable[Any]) -> Parameters | None:
    """Those of linear layers that are all plain and all have a bias, or all none; else None."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for linear in linears:
        if type(linear) is not nn.Linear or not is_unhooked(linear):
            return None
        parameters = linear._parameters  # a module's attributes take a microsecond each
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None:
            return None
        weights.append(weight)
        if bias is not None:
            biases.append(bias)
    return Parameters(weights, biases) if len(biases) in (0, len(weights)) else None


def is_one_product(x: Tensor, parameters: Parameters) -> bool:
    """True if one product of x with ``parameters`` is all that calling their layers comes to."""
    params = (*parameters.weights, *parameters.biases)
    if dispatch.wants_gradient(x, params) or not dispatch.is_untraced(x, params):
        return False
    fits = (x.dtype, x.shape[-1]) == (params[0].dtype, params[0].shape[-1])
    return fits and not torch.is_autocast_enabled(x.device.type)


def joined(owner: nn.Module, parameters: Parameters) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the layer that computes what the layers of ``parameters`` do.

    Each is one tensor over neighbors among those packed for ``owner``. None if any lie apart.
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
    """One tensor over ``parts``, or None if they are not neighbors within ``allocation``."""
    first = parts[0]
    dtype, columns = first.dtype, first.shape[1:]
    start = end = first.data_ptr()
    rows = 0
    for part in parts:
        if (
            part.data_ptr() != end
            or part.dtype != dtype
            or part.shape[1:] != columns
            or not part.is_contiguous()
        ):
            return None
        end += part.nbytes
        rows += part.shape[0]
    offset = start - allocation.data_ptr()
    if first.device != allocation.device or offset < 0 or offset + end - start > allocation.nbytes():
        return None
    return first.new_empty(0).set_(allocation, offset // first.itemsize, (rows, *columns), (*columns, 1))


def pack(owner: nn.Module, linears: Iterable[Any]) -> None:
    """Puts the parameters of ``linears``, parts of ``owner``, side by side where possible and of use.

    Values, strides and identities stay. What is not memory of its own stays where it is: parameters
    that share a storage with anything else (tied weights, a state_dict that somebody holds),
    quantized or offloaded ones.
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
            return  # a full GPU holds the model all the same


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
    """Everything that can fail comes before the first change."""
    # Memory made in inference mode would turn the parameters into inference tensors.
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
    """Give each parameter of ``owner`` that ``pack`` has moved memory of its own again."""
    allocation = _allocation(owner)
    if allocation is not None:
        start, end = allocation.data_ptr(), allocation.data_ptr() + allocation.nbytes()
        with torch.inference_mode(False), torch.no_grad():
            for parameter in owner.parameters():
                if parameter.device == allocation.device and start <= parameter.data_ptr() < end:
                    parameter.data = parameter.data.clone()
    _allocations.pop(owner, None)  # last: after an interrupt ``restore`` goes on here
