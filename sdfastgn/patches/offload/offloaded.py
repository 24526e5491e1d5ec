"""Moves the weights of offloaded models to the GPU and back, faster than diffusers' own code (*stock*).

After ``enable_model_cpu_offload``, a pipeline moves a model to the GPU when it calls the model. The model
returns to main memory when the pipeline calls another model, or when the image is done. Stock copies all
weights both ways. Here ``StagedCopy`` copies large weights, and fewer weights are copied back.

Main memory keeps the large weights while their model is on the GPU. When the model returns, each weight that
did not change on the GPU gets its old memory back. The changed weights are copied. Checksums tell whether a
weight has changed. The GPU computes them after the weights arrive and again before they return.

Memory is kept only if an earlier return from the GPU has allocated it, and if no other tensor or process
shares it when the model leaves for the GPU. Memory from elsewhere may be mapped from a file, or other code
may write into it. So the first return of a model copies all weights.

While a model is on the GPU, its large weights also take main memory, as much as between two images. If the
hook that offloads the model is removed meanwhile, the memory is kept until the next move. If this move is to
main memory, unchanged weights get their old memory back. Any other move frees the memory, and so does
``restore``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.checksum.op import checksums
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import is_alone, refers_to
from sdfastgn.patches.offload.staged_copy import StagedCopy
from sdfastgn.patches.swap.class_forward import is_offloaded_whole

# Size in bytes of the smallest weight that ``StagedCopy`` copies, and whose main memory is kept while its
# model is on the GPU. For a smaller weight, a checksum takes as long as a copy.
_MIN_BYTES = 2**20
# For ``checksums``, a weight's size must be a multiple of _WORD bytes, and its address of _ALIGNMENT.
_WORD = 8
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Kept:
    """Main memory that is kept for the weights of a model while the model is on the GPU.

    Attributes:
        homes: id of a parameter -> a tensor in main memory with the parameter's values at its arrival.
        sums: checksums of the parameters after their arrival, in the order of ``homes``, as a GPU tensor.
    """

    homes: dict[int, Tensor]
    sums: Tensor


# Model on the GPU -> the main memory that is kept for it.
_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
# Model -> {id of a parameter: a weak reference to its storage}, for large weights back from the GPU.
# The keys are ids and not weak references: with ``torch.__future__.set_swap_module_params_on_conversion``,
# PyTorch cannot move a tensor that has a weak reference.
_returned: weakref.WeakKeyDictionary[nn.Module, dict[int, StorageWeakRef]] = weakref.WeakKeyDictionary()


def forget(root: nn.Module) -> None:
    """Free the main memory that is kept for ``root``. The next return of ``root`` copies all weights."""
    _kept.pop(root, None)
    _returned.pop(root, None)


@contextlib.contextmanager
def moving(root: nn.Module, fn: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """A context for ``root._apply(fn)``, which moves or converts all tensors in ``root``.

    Yields the function that the block must apply instead of ``fn``. After that, the block may also change the
    layout of the weights.
    """
    weights = {id(weight): weight for weight in root.parameters() if _is_large(weight)}
    on_gpu = {key: weight for key, weight in weights.items() if _is_on_gpu(weight)}
    at_home = {key: weight for key, weight in weights.items() if _is_at_home(weight)}
    is_offloaded = is_offloaded_whole(root)
    returns = (is_offloaded or root in _kept) and _goes_home(fn, on_gpu.values())
    unchanged = _unchanged(root, weights) if returns else {}
    destination = _destination(fn, at_home.values()) if is_offloaded else None
    homes = {} if destination is None else _homes(root, at_home)
    if returns:
        copied, may_be_staged = {key: w for key, w in on_gpu.items() if key not in unchanged}, _may_return
        stage = _stage_on({weight.device for weight in copied.values()}, copied.values(), may_be_staged)
    else:
        copied, may_be_staged = at_home, _may_go
        stage = _stage_on({destination}, copied.values(), may_be_staged)

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) in unchanged:
            return unchanged[id(tensor)]
        # If two modules share a weight, ``move`` gets it twice. The second time, the weight has arrived
        # already, so ``may_be_staged`` is False, and ``fn`` returns the weight as it is.
        if stage is not None and id(tensor) in copied and may_be_staged(tensor):
            return stage.to_cpu(tensor) if returns else stage.to_gpu(tensor)
        return fn(tensor)

    try:
        yield move
        _note_returns(root, {key: weights[key] for key in on_gpu if _is_at_home(weights[key])})
        pairs = [(weights[key], home) for key, home in homes.items()]
        _keep(root, [pair for pair in pairs if _has_arrived(*pair, destination)])
    finally:
        _wait_for(destination)


def _note_returns(root: nn.Module, returned: dict[int, nn.Parameter]) -> None:
    """Record that the large weights ``returned`` came back to main memory.

    Then free the main memory that is kept for ``root``. It stays only if ``root`` is offloaded, no weight
    came back, and a weight with kept memory is still on the GPU.
    """
    if returned:
        _returned[root] = {key: StorageWeakRef(each.untyped_storage()) for key, each in returned.items()}
    kept = _kept.get(root)
    if kept is None:
        return
    stays = any(id(weight) in kept.homes and _is_on_gpu(weight) for weight in root.parameters())
    if returned or not stays or not is_offloaded_whole(root):
        # ``pop`` gets a default, because another thread may have removed the entry of ``root`` already.
        _kept.pop(root, None)


def _keep(root: nn.Module, arrived: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Keep main memory of weights that have just arrived on a GPU, and compute their checksums.

    ``arrived``: a pair (weight, its main memory) for each of these weights.
    """
    if arrived and dispatch.is_on():
        with contextlib.suppress(torch.OutOfMemoryError):
            sums = checksums([weight for weight, _ in arrived])
            _kept[root] = _Kept({id(weight): home for weight, home in arrived}, sums)


def _wait_for(device: torch.device | None) -> None:
    """Wait for the copies and checksums on the current stream of ``device``, if it is a GPU.

    Without this wait, another stream could read a weight before it is copied, or change it before its
    checksum is computed. PyTorch's own copies from main memory wait too.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _is_on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


def _is_at_home(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and not _is_on_gpu(weight)


def _is_large(weight: Tensor) -> bool:
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return False
    # In memory a conjugate or negative view has the values before conjugation or negation, so its bytes
    # cannot be copied as they are.
    if weight.is_conj() or weight.is_neg():
        return False
    size = weight.numel() * weight.element_size()
    return size >= _MIN_BYTES and size % _WORD == 0


def _homes(root: nn.Module, at_home: dict[int, nn.Parameter]) -> dict[int, Tensor]:
    """Returns {id of a parameter: its main memory}, if this memory may be kept while ``root`` is on the GPU.

    ``at_home``: the weights of ``root`` in main memory.
    """
    returned = _returned.get(root, {})
    return {
        key: weight.data
        for key, weight in at_home.items()
        if key in returned
        and refers_to(returned[key], weight)
        and is_alone(weight)
        and not weight.is_shared()
    }


def _stage_on(
    devices: Collection[torch.device | None],
    weights: Iterable[Tensor],
    may_be_staged: Callable[[Tensor], bool],
) -> StagedCopy | None:
    """Returns a ``StagedCopy`` for ``weights``, or None if PyTorch must copy all of them.

    The result is None in each of these cases: ``devices`` is not exactly one GPU; none of ``weights`` may be
    staged; there is no pinned memory; PyTorch has only one CPU thread, so that little would be gained.
    """
    device = next(iter(devices)) if len(devices) == 1 else None
    if device is None or device.type != "cuda" or torch.get_num_threads() == 1:
        return None
    if not any(map(may_be_staged, weights)):
        return None
    try:
        return StagedCopy(device)
    except RuntimeError:
        return None


def _may_go(weight: Tensor) -> bool:
    """True if ``StagedCopy`` can copy ``weight`` to a GPU, and does so faster than PyTorch.

    PyTorch copies pinned memory faster, without a buffer.
    """
    return _is_at_home(weight) and not weight.is_pinned() and _is_dense(weight)


def _may_return(weight: Tensor) -> bool:
    """True if ``StagedCopy`` can copy ``weight`` to main memory."""
    return _is_on_gpu(weight) and _is_dense(weight)


def _has_arrived(weight: Tensor, home: Tensor, device: torch.device | None) -> bool:
    return weight.device == device and _may_be_copy(weight, home)


def _may_be_copy(weight: Tensor, home: Tensor) -> bool:
    """True if ``weight``, on a GPU, may be compared with ``home``, its copy in main memory, by checksums.

    That is, both have the same dtype, shape and strides, and ``weight`` has no gaps in memory and an aligned
    address.
    """
    is_readable = _is_dense(weight) and weight.data_ptr() % _ALIGNMENT == 0
    is_same = (weight.dtype, weight.shape, weight.stride()) == (home.dtype, home.shape, home.stride())
    return _is_on_gpu(weight) and is_same and is_readable


def _is_dense(weight: Tensor) -> bool:
    """True if ``weight`` has no gaps in memory, and no elements that share memory."""
    # ``empty_like`` keeps the strides of a tensor without gaps and overlaps, and changes any other strides.
    return torch.empty_like(weight, device="meta").stride() == weight.stride()


def _unchanged(root: nn.Module, weights: dict[int, nn.Parameter]) -> dict[int, Tensor]:
    """Returns {id of a parameter: its kept memory} for the weights that did not change on the GPU.

    The result is empty if kernels are off, or if memory for checksums is short. Nothing is kept for ``root``
    any more when this function returns. So the old memory of a changed weight is freed before the caller
    copies the weight.
    """
    kept = _kept.pop(root, None)
    if kept is None:
        return {}
    still = {
        key: slot
        for slot, (key, home) in enumerate(kept.homes.items())
        if key in weights
        and _may_be_copy(weights[key], home)
        and weights[key].device == kept.sums.device
        # A weight that PyTorch moves to main memory is an inference tensor only in inference mode. So outside
        # of inference mode, kept memory that is an inference tensor must not become the weight.
        and (not home.is_inference() or torch.is_inference_mode_enabled())
    }
    if not still or not dispatch.is_on():
        return {}
    try:
        same = checksums([weights[key] for key in still]) == kept.sums[list(still.values())]
        return {key: kept.homes[key] for key, is_same in zip(still, same.tolist(), strict=True) if is_same}
    except torch.OutOfMemoryError:
        return {}


def _goes_home(fn: Callable[[Tensor], Tensor], weights: Collection[Tensor]) -> bool:
    """True if ``fn`` copies ``weights`` to main memory, and does nothing else."""
    destination = _destination(fn, weights)
    return destination is not None and destination.type == "cpu"


def _destination(fn: Callable[[Tensor], Tensor], weights: Collection[Tensor]) -> torch.device | None:
    """The device to which ``fn`` copies ``weights``. None unless ``fn`` copies all to one device.

    It is also None if ``weights`` is empty, or if ``fn`` does more than copy. To find out, ``fn`` is called
    with a small tensor for each device, dtype and order of strides among the weights.
    """
    devices = set()
    for device, dtype, order in {(each.device, each.dtype, _order_of(each)) for each in weights}:
        try:
            values = _values(4 ** len(order), dtype).to(device).view((4,) * len(order))
            small = values.permute([order.index(axis) for axis in range(len(order))])
            copy = fn(small)
            is_same = (copy.dtype, copy.stride()) == (dtype, small.stride()) and _bits(copy) == _bits(small)
        except Exception:  # memory is short, or ``fn`` cannot handle tensors that are not of the model
            return None
        if not is_same or (copy.device.type == "cpu" and (copy.is_pinned() or copy.is_shared())):
            return None
        devices.add(copy.device)
    return devices.pop() if len(devices) == 1 else None


def _values(count: int, dtype: torch.dtype) -> Tensor:
    """Values (count,) of ``dtype`` that show whether a function is a plain copy.

    The bytes differ from each other, so that most functions that do not only copy change some of them. If
    ``dtype`` has an infinity and a NaN, both are among the values.
    """
    if dtype is torch.bool:
        return torch.arange(count) % 2 == 0
    content = (torch.arange(count * dtype.itemsize) * 167 + 89).to(torch.uint8)
    if dtype.is_floating_point:
        special = torch.tensor([-torch.inf, torch.nan]).to(dtype).view(torch.uint8)
        content[: len(special)] = special
    return content.view(dtype)


def _order_of(weight: Tensor) -> tuple[int, ...]:
    """The axes of ``weight`` in the order of its memory, the outermost first."""
    strides = weight.stride()
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


def _bits(tensor: Tensor) -> list[int]:
    return tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()
