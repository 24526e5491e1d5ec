"""Packs the weights of linear layers that read the same tensor, so that one matrix product computes them all.

The parameters are moved side by side into one allocation (``kernels/product/packed.py``).

At each call of the model, ``joined`` checks that all parameters are still in the allocation, and returns a
view of the allocation as the joined weight. So a write into a parameter takes effect. ``joined`` also notices
that a parameter was moved (``.to()``, ``param.data = ...``, ``load_state_dict(assign=True)``, offloading).

The model's own parameters are never packed during a call of the model. Packing frees their old memory, and a
CUDA graph that was captured earlier would still read it. But new merged weights of adapters may be packed
during a call, because no graph reads them yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import revived
from sdfastgn.kernels.product import packed
from sdfastgn.patches.swap.fusion import is_unhooked

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
        # Reading ``_parameters`` is faster than reading ``linear.weight``, which takes a microsecond.
        parameters = linear._parameters
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
    weight = packed.span(allocation, parameters.weights)
    bias = packed.span(allocation, parameters.biases) if parameters.biases else None
    if weight is None or (parameters.biases and bias is None):
        return None
    return weight, bias


def _allocation(owner: nn.Module) -> torch.UntypedStorage | None:
    reference = _allocations.get(owner)
    return None if reference is None else revived(reference)


def pack(owner: nn.Module, linears: Sequence[Any]) -> None:
    """Move the parameters of ``linears``, which are layers of ``owner``, side by side if possible.

    The parameters stay the same objects and keep their values. None is moved if one of them is quantized or
    offloaded, or shares its storage with another tensor (``kernels/product/packed.py``).
    """
    parameters = plain_parameters(linears)
    if parameters is None or joined(owner, parameters) is not None:
        return
    reference = packed.pack(*parameters)
    if reference is not None:
        _allocations[owner] = reference


def unpack(owner: nn.Module) -> None:
    """Undoes ``pack``: each parameter of ``owner`` in the common allocation gets separate memory again."""
    allocation = _allocation(owner)
    if allocation is not None:
        start, end = allocation.data_ptr(), allocation.data_ptr() + allocation.nbytes()
        with torch.inference_mode(False), torch.no_grad():
            for parameter in owner.parameters():
                if parameter.device == allocation.device and start <= parameter.data_ptr() < end:
                    parameter.data = parameter.data.clone()
    # The entry of the allocation is removed last. If an interrupt stops the loop before, another call of
    # ``unpack`` still finds the allocation and goes on.
    _allocations.pop(owner, None)
