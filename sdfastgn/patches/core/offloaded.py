"""Models return from the GPU to main memory without a copy of the weights that did not change.

After ``enable_model_cpu_offload``, a pipeline moves each model to the GPU before its calls and back after
them. Stock copies all weights both ways. But a weight rarely changes on the GPU. So here main memory keeps
the weights while the model is on the GPU, and each parameter gets its old memory back when the model returns.
A weight that changed on the GPU is copied as in stock. Checksums, computed on the GPU at arrival and before
the return, tell whether a weight has changed.

The first return of a model is as in stock. Only the memory that it allocates is kept later, and only while no
other tensor shares it. Memory from elsewhere may belong to a file, or to code that writes into it.

While a model is on the GPU, its weights take main memory as they do between two images.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
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
# ``checksums`` needs sizes and addresses, in bytes, that are multiples of these numbers.
_WORD = 8
_ALIGNMENT = 16
# After these errors of ``checksums``, weights are copied as in stock.
_ERRORS = (KernelError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class _Kept:
    """The weights of a model that is on the GPU.

    Attributes:
        homes: id of a parameter -> its memory in main memory.
        sums: the checksums of these parameters on the GPU at their arrival, in the order of ``homes``.
    """

    homes: dict[int, Tensor]
    sums: Tensor


# Model on the GPU -> its weights in main memory.
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
# Model -> {id of a parameter: its storage in main memory}, for the large weights that returned from the GPU.
# Parameters are found by their ids, because PyTorch cannot swap tensors to which there are weak references.
_returned: weakref.WeakKeyDictionary[nn.Module, dict[int, StorageWeakRef]] = weakref.WeakKeyDictionary()


def forget(root: nn.Module) -> None:
    """Free the main memory that is kept for ``root``. If it is on the GPU, its next return is as in stock."""
    _kept.pop(root, None)
    _returned.pop(root, None)


@contextlib.contextmanager
def moving(root: nn.Module, fn: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """A context for ``root._apply(fn)``, which moves or converts all tensors in ``root``.

    Yields the function that must be applied instead of ``fn``. The rest of the block may change the layout of
    the weights.
    """
    weights = {id(weight): weight for weight in root.parameters() if _is_large(weight)}
    on_gpu = {key for key, weight in weights.items() if _is_on_gpu(weight)}
    unchanged = _unchanged(_kept.pop(root, None), weights, fn)
    homes = _homes(root, weights)
    yield lambda tensor: unchanged[id(tensor)] if id(tensor) in unchanged else fn(tensor)
    arrived = [key for key, home in homes.items() if _is_copy(weights[key], home)]
    if arrived and dispatch.is_on():
        with contextlib.suppress(*_ERRORS):
            sums = checksums([weights[key] for key in arrived])
            _kept[root] = _Kept({key: homes[key] for key in arrived}, sums)
    if on_gpu:
        _returned[root] = {
            key: StorageWeakRef(weights[key].untyped_storage()) for key in on_gpu if _is_at_home(weights[key])
        }


def _is_on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


def _is_at_home(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and not _is_on_gpu(weight)


def _is_large(weight: Tensor) -> bool:
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return False
    size = weight.numel() * weight.element_size()
    return size >= _MIN_BYTES and size % _WORD == 0


def _homes(root: nn.Module, weights: dict[int, nn.Parameter]) -> dict[int, Tensor]:
    """Returns {id of a parameter: its memory} for the weights of ``root`` in main memory that may be kept."""
    returned = _returned.get(root)
    if returned is None or not is_offloaded_whole(root):
        return {}
    return {
        key: weight.data
        for key, weight in weights.items()
        if key in returned and _is_at_home(weight) and refers_to(returned[key], weight) and is_alone(weight)
    }


def _is_copy(weight: Tensor, home: Tensor) -> bool:
    """True if ``weight`` is on a GPU, with the dtype, shape and strides of ``home``.

    False if ``checksums`` cannot read it, because it has gaps or its address is not aligned.
    """
    shape, strides = weight.shape, weight.stride()
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    is_readable = last == weight.numel() - 1 and weight.data_ptr() % _ALIGNMENT == 0
    is_same = (weight.dtype, shape, strides) == (home.dtype, home.shape, home.stride())
    return _is_on_gpu(weight) and is_same and is_readable


def _unchanged(
    kept: _Kept | None, weights: dict[int, nn.Parameter], fn: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Returns {id of a parameter: memory in main memory with the parameter's present values}.

    The result is empty unless ``fn`` copies weights to main memory.
    """
    if kept is None or not dispatch.is_on():
        return {}
    still = [
        (slot, key)
        for slot, (key, home) in enumerate(kept.homes.items())
        if key in weights and _is_copy(weights[key], home) and weights[key].device == kept.sums.device
    ]
    kinds = {(weights[key].dim(), weights[key].dtype) for _, key in still}
    if not still or not all(_only_copies(fn, *kind, kept.sums.device) for kind in kinds):
        return {}
    slots, keys = zip(*still, strict=True)
    try:
        same = checksums([weights[key] for key in keys]) == kept.sums[list(slots)]
    except _ERRORS:
        return {}
    return {key: kept.homes[key] for key, is_same in zip(keys, same.tolist(), strict=True) if is_same}


def _only_copies(fn: Callable[[Tensor], Tensor], dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True if ``fn`` copies a tensor from ``device`` to main memory, with the same dtype and strides."""
    tensor = torch.empty((2,) * dim, dtype=dtype, device=device)
    copy = fn(tensor)
    return (copy.device.type, copy.dtype, copy.stride()) == ("cpu", tensor.dtype, tensor.stride())
