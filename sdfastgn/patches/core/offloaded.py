"""When an offloaded model returns from the GPU to main memory, only weights that changed there are copied.

After ``enable_model_cpu_offload``, a pipeline moves each model to the GPU before its calls and back after
them. diffusers' own code (*stock*) copies all weights both ways. But a weight rarely changes on the GPU. So
here main memory keeps the weights while the model is on the GPU, and each parameter gets its old memory back
when the model returns. A weight that changed on the GPU is copied as in stock. Checksums tell whether a
weight has changed. The GPU computes them after the weights arrive and again before they return.

Memory is kept only if an earlier return from the GPU has allocated it, and if no other tensor shares it when
the model leaves for the GPU. Memory from elsewhere may be mapped from a file, or other code may write into
it. So the first return of a model copies all weights.

While a model is on the GPU, its weights also take main memory, as much as between two images. If the hook
that offloads a model is removed while the model is on the GPU, this memory is freed when the model is moved
or restored.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.checksum.op import checksums
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.dispatch import KernelError
from sdfastgn.kernels.common.private import is_alone, refers_to
from sdfastgn.patches.core.class_forward import is_offloaded_whole

__all__ = ["forget", "moving"]

# Smallest weight, in bytes, whose memory is kept. For a smaller one, a checksum takes as long as a copy.
_MIN_BYTES = 2**20
# For ``checksums``, a weight's size must be a multiple of _WORD bytes, and its address of _ALIGNMENT.
_WORD = 8
_ALIGNMENT = 16
# If ``checksums`` raises one of these errors, weights are copied as in stock.
_ERRORS = (KernelError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class _Kept:
    """Main memory that is kept for the weights of a model while the model is on the GPU.

    Attributes:
        homes: id of a parameter -> a tensor in main memory with the parameter's values at its arrival.
        sums: the checksums that the parameters had after they arrived, on the GPU, in the order of ``homes``.
    """

    homes: dict[int, Tensor]
    sums: Tensor


# Model on the GPU -> the main memory that is kept for it.
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
# Model -> {id of a parameter: its storage in main memory}, for the large weights that returned from the GPU.
# The keys are ids and not weak references: with ``torch.__future__.set_swap_module_params_on_conversion``,
# PyTorch cannot move a tensor that has a weak reference.
_returned: weakref.WeakKeyDictionary[nn.Module, dict[int, StorageWeakRef]] = weakref.WeakKeyDictionary()


def forget(root: nn.Module) -> None:
    """Free the main memory that is kept for ``root``. If ``root`` is on the GPU, it returns as in stock."""
    _kept.pop(root, None)
    _returned.pop(root, None)


@contextlib.contextmanager
def moving(root: nn.Module, fn: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """A context for ``root._apply(fn)``, which moves or converts all tensors in ``root``.

    Yields the function that the block must apply instead of ``fn``. After that, the block may also change the
    layout of the weights.
    """
    weights = {id(weight): weight for weight in root.parameters() if _is_large(weight)}
    on_gpu = {key for key, weight in weights.items() if _is_on_gpu(weight)}
    kept = _kept.get(root)
    unchanged = {} if kept is None else _unchanged(kept, weights, fn)
    homes = _homes(root, weights, fn)
    yield lambda tensor: unchanged[id(tensor)] if id(tensor) in unchanged else fn(tensor)
    returned = {key: weights[key] for key in on_gpu if _is_at_home(weights[key])}
    if returned:
        _returned[root] = {key: StorageWeakRef(each.untyped_storage()) for key, each in returned.items()}
    if returned or not is_offloaded_whole(root):
        _kept.pop(root, None)
    arrived = [key for key, home in homes.items() if _may_be_copy(weights[key], home)]
    if arrived and dispatch.is_on():
        with contextlib.suppress(*_ERRORS):
            sums = checksums([weights[key] for key in arrived])
            _kept[root] = _Kept({key: homes[key] for key in arrived}, sums)


def _is_on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


def _is_at_home(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and not _is_on_gpu(weight)


def _is_large(weight: Tensor) -> bool:
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return False
    size = weight.numel() * weight.element_size()
    return size >= _MIN_BYTES and size % _WORD == 0


def _homes(
    root: nn.Module, weights: dict[int, nn.Parameter], fn: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Returns {id of a parameter: its memory} for the weights of ``root`` in main memory that may be kept.

    The result is empty if ``fn`` does more than copy.
    """
    returned = _returned.get(root)
    if returned is None or not is_offloaded_whole(root):
        return {}
    found = {
        key: weight
        for key, weight in weights.items()
        if key in returned and _is_at_home(weight) and refers_to(returned[key], weight) and is_alone(weight)
    }
    return {key: weight.data for key, weight in found.items()} if _copies_to(fn, found.values()) else {}


def _may_be_copy(weight: Tensor, home: Tensor) -> bool:
    """True if ``weight`` is on a GPU, has the dtype, shape and strides of ``home``, and has a checksum.

    ``checksums`` cannot read a weight that has gaps in memory, or whose address is not aligned.
    """
    shape, strides = weight.shape, weight.stride()
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    is_readable = last == weight.numel() - 1 and weight.data_ptr() % _ALIGNMENT == 0
    is_same = (weight.dtype, shape, strides) == (home.dtype, home.shape, home.stride())
    return _is_on_gpu(weight) and is_same and is_readable


def _unchanged(
    kept: _Kept, weights: dict[int, nn.Parameter], fn: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Returns {id of a parameter: its kept memory} for the weights that did not change on the GPU.

    The result is empty if ``fn`` does more than copy to main memory, or if checksums fail.
    """
    still = {
        key: slot
        for slot, (key, home) in enumerate(kept.homes.items())
        if key in weights
        and _may_be_copy(weights[key], home)
        and weights[key].device == kept.sums.device
        # A copy outside of inference mode would be no inference tensor.
        and (not home.is_inference() or torch.is_inference_mode_enabled())
    }
    if not still or not dispatch.is_on() or _copies_to(fn, [weights[key] for key in still]) != "cpu":
        return {}
    try:
        same = checksums([weights[key] for key in still]) == kept.sums[list(still.values())]
        return {key: kept.homes[key] for key, is_same in zip(still, same.tolist(), strict=True) if is_same}
    except _ERRORS:
        return {}


def _copies_to(fn: Callable[[Tensor], Tensor], weights: Collection[Tensor]) -> str:
    """The type of device to which ``fn`` copies ``weights``. Empty if ``fn`` does anything else to them.

    ``fn`` is called with a small tensor for each device, dtype and order of strides among the weights.
    """
    devices = set()
    for device, dtype, order in {(each.device, each.dtype, _order_of(each)) for each in weights}:
        try:
            values = torch.arange(2 ** len(order), device=device).to(dtype).view((2,) * len(order))
            small = values.permute([order.index(axis) for axis in range(len(order))])
            copy = fn(small)
            is_same = (copy.dtype, copy.stride()) == (dtype, small.stride()) and _bits(copy) == _bits(small)
        except Exception:  # memory is short, or ``fn`` knows only the tensors of the model
            return ""
        if not is_same or (copy.device.type == "cpu" and (copy.is_pinned() or copy.is_shared())):
            return ""
        devices.add(copy.device.type)
    return devices.pop() if len(devices) == 1 else ""


def _order_of(weight: Tensor) -> tuple[int, ...]:
    """The axes of ``weight`` in the order of its memory, the outermost first."""
    strides = weight.stride()
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def _bits(tensor: Tensor) -> list[int]:
    return tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()
