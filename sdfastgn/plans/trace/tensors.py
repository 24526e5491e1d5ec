"""Traced tensors: they have a shape, strides, a dtype and a device, but no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx

from sdfastgn.kernels.common import private
from sdfastgn.plans.trace.refusals import refuse


class Metadata:
    """What is known of a tensor without its values. Equal metadata is the same object."""

    __slots__ = ("device", "dtype", "for_node", "shape", "stride")

    def __init__(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.stride, self.dtype, self.device = shape, stride, dtype, device
        self.for_node = {"shape": shape, "dtype": dtype, "device": device}


_known: dict[Any, Metadata] = {}


def metadata(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Metadata:
    key = tuple(shape), tuple(stride), dtype, device
    found = _known.get(key)
    return found if found is not None else _known.setdefault(key, Metadata(*key))


def metadata_of(t: Tensor) -> Metadata:
    return metadata(t.shape, t.stride(), t.dtype, t.device)


def forget_metadata() -> None:
    _known.clear()


class Step(NamedTuple):
    """An op that makes a view of a tensor: ``op(tensor, *args, **kwargs)``."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Metadata


class Memory:
    """What a trace does not know of a tensor's memory, because strides of results may differ by device.

    A tensor and its views have the same memory. If strides decide whether a result is a view or a copy, it
    has its own ``Memory``.

    Attributes:
        is_guess: True if the strides may differ from the strides in the trace.
        others: the ``Memory`` of each tensor that may lie in the same memory.
        is_written: True if a tensor in one of the ``others`` has been written.
    """

    __slots__ = ("is_guess", "is_written", "others")

    def __init__(self, is_guess: bool = True) -> None:
        self.is_guess, self.is_written = is_guess, False
        self.others: set[Memory] = set()

    def of_view_or_copy(self, is_guess: bool) -> Memory:
        made = Memory(is_guess)
        made.others = {self, *self.others}
        for other in made.others:
            other.others.add(made)
        return made

    def write(self) -> None:
        for other in self.others:
            other.is_written = True


def _refused(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"the call uses Tensor.{name}")

    return method


class TracedTensor(Tensor):
    """A tensor without memory.

    Attributes:
        metadata: its shape, strides, dtype and device.
        node: the node of the graph whose value it has.
        base: the tensor whose memory it is a view of. None: it has memory of its own.
        path: the steps that lead from ``base`` to it.
        version: of a base, the number of writes into it. Of a view, the base's version that ``node`` has.
        memory: None if all is known of its memory.
        fills: of a base, the writes into it that wait (``fills.py``). None: no further ones wait.
    """

    metadata: Metadata
    node: fx.Node
    base: TracedTensor | None
    path: tuple[Step, ...]
    version: int
    memory: Memory | None
    fills: list[Any] | None

    __torch_function__ = private.disabled_torch_function

    @property
    def owner(self) -> TracedTensor:
        """The tensor that has the memory: the base, or itself if it is no view."""
        return self if self.base is None else self.base

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        refuse("a tensor of a trace is used outside of this trace")

    numpy = _refused("numpy")
    tolist = _refused("tolist")
    data_ptr = _refused("data_ptr")
    storage = _refused("storage")
    untyped_storage = _refused("untyped_storage")
    storage_offset = _refused("storage_offset")
    share_memory_ = _refused("share_memory_")
    __array__ = _refused("__array__")
    __dlpack__ = _refused("__dlpack__")
    __reduce_ex__ = _refused("__reduce_ex__")
    # PyTorch would exchange what its C++ tensor refers to, and the node would stay.
    data = property(lambda self: self.detach(), _refused("data"))

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Calls the op, because PyTorch's method may return the tensor itself, unseen by the trace."""
        return torch.ops.aten.contiguous.default(self, memory_format=memory_format)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"traced tensor of shape {self.metadata.shape}"


def make(
    m: Metadata, node: fx.Node, base: TracedTensor | None = None, path: tuple[Step, ...] = ()
) -> TracedTensor:
    # PyTorch lets a view of a parameter be no inference tensor, even in inference mode.
    with torch.inference_mode(False):
        t: Any = private.make_wrapper(TracedTensor, m.shape, strides=m.stride, dtype=m.dtype, device=m.device)
    t.metadata, t.node, t.base, t.path = m, node, base, path
    t.version, t.memory, t.fills = 0 if base is None else base.version, None, []
    return t
