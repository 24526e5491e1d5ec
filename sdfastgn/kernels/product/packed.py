"""Parameters side by side in one allocation of memory, so that one matrix product reads them all.

Each parameter stays the same object and stays contiguous. Its storage object is a separate one, which covers
only its slice of the allocation. So code that looks for parameters with a common storage finds none:
``torch.save`` and pickle write each parameter separately, and accelerate's ``save_model``, which saves only
one parameter of each storage, saves them all.

Only weak references to allocations are kept. An allocation is freed with the last parameter in it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.private import is_alone, revived

# Types of device on which parameters are packed. One large matrix product keeps a GPU busier than three small
# ones. A small product already keeps a CPU busy, so packing would not be faster there.
PACKED_DEVICES = ("cuda",)
# The address of each parameter is a multiple of this number of bytes, because matrix products read 16 bytes
# at once.
_ALIGNMENT = 16

# Maps the address of the first parameter of a row (parameters side by side) to a weak reference to the
# allocation in which the row lies.
_allocations: dict[int, StorageWeakRef] = {}


def pack(*rows: Sequence[Tensor]) -> StorageWeakRef | None:
    """Moves the parameters in ``rows`` into one allocation. The parameters of a row lie side by side.

    The parameters keep their values and strides, and stay the same objects. No parameter is moved if one of
    them is quantized or offloaded, or shares its storage (tied weights, a state_dict that other code keeps),
    or if there is no memory for the allocation.

    Moving frees the old memory. A CUDA graph that was captured earlier would still read it. So call this only
    if there is no such graph, and if no other thread runs the model.

    Returns a weak reference to the allocation; None if nothing was moved.
    """
    parts = [part for row in rows for part in row]
    captures = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if captures or not dispatch.is_untraced(parts[0], tuple(parts)) or len(set(parts)) < len(parts):
        return None
    if not all(_fits(part, parts[0]) for part in parts):
        return None
    try:
        reference = StorageWeakRef(_move(parts))
    except torch.OutOfMemoryError:
        return None
    _forget_freed()
    _allocations.update({row[0].data_ptr(): reference for row in rows if row})
    return reference


def joined(row: Sequence[Tensor]) -> Tensor | None:
    """The parameters of a row that ``pack`` has moved, as one tensor: a view of their allocation.

    None if they are not side by side, for example because one of them was moved elsewhere since.
    """
    reference = _allocations.get(row[0].data_ptr())
    allocation = None if reference is None else revived(reference)
    return None if allocation is None else span(allocation, row)


def span(allocation: torch.UntypedStorage, parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over the tensors ``parts``; None if they are not side by side in ``allocation``."""
    first = parts[0]
    dtype, shape, size = first.dtype, first.shape, first.nbytes
    columns = shape[1:]
    start = end = first.data_ptr()
    rows = 0
    for part in parts:
        if part.data_ptr() != end or part.dtype != dtype or not part.is_contiguous():
            return None
        own = part.shape
        if own == shape:  # equal shapes are usual, and faster to compare than slices
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


def unpack(parameters: Iterable[Tensor]) -> None:
    """Undoes ``pack``: copies each parameter that lies in an allocation of ``pack`` to memory of its own."""
    found = list(parameters)
    with torch.inference_mode(False), torch.no_grad():
        for parameter, is_in in zip(found, are_packed(found), strict=True):
            if is_in:
                parameter.data = parameter.data.clone()


def are_packed(parts: Sequence[Tensor]) -> list[bool]:
    """For each of the tensors ``parts``, whether it lies in an allocation that ``pack`` has made."""
    _forget_freed()
    alive = {a.data_ptr(): a for a in map(revived, list(_allocations.values())) if a is not None}
    starts = sorted(alive)
    found = []
    for part in parts:
        i = bisect.bisect_right(starts, part.data_ptr()) - 1
        allocation = alive[starts[i]] if i >= 0 else None
        found.append(
            allocation is not None
            and allocation.device == part.device
            and part.data_ptr() < allocation.data_ptr() + allocation.nbytes()
        )
    return found


def _forget_freed() -> None:
    for address, reference in list(_allocations.items()):
        if reference.expired():
            _allocations.pop(address, None)


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
    """Moves the parameters ``parts`` into a new allocation, and returns it. After an error none was moved."""
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
