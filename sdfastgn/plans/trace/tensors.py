"""The tensors of a trace. They have a shape, strides, a dtype and a device, but no memory and no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx

from sdfastgn.kernels.common import private
from sdfastgn.plans.trace.refusals import refuse


class Metadata:
    """Shape, strides, dtype and device of a tensor. For equal ones there is only one object."""

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
    """One op that makes a view: ``op(tensor, *args, **kwargs)``. ``result`` is the metadata of the view."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Metadata


class Memory:
    """Says that a trace does not know exactly where a tensor lies in memory.

    This is so if an op gives other strides on other devices. An op such as ``reshape`` then returns a view or
    a copy, depending on the strides. A tensor and its certain views share one ``Memory``. A result that may
    be a view or a copy gets its own.

    Attributes:
        is_guess: True if the strides on the device may differ from those in the trace.
        others: the ``Memory`` of each tensor that may lie in the same memory as this one.
        is_written: True if the traced code has written into a tensor of one of the ``others``. Then it is not
            known whether this tensor has changed too.
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
    """A tensor without memory, with which the model's code runs in a trace.

    Attributes:
        metadata: shape, strides, dtype and device.
        node: the node of the graph whose value the tensor has.
        base: the tensor of which this one is a view. None if it is no view.
        path: the view ops that lead from ``base`` to this tensor.
        version: if the tensor is no view, the number of writes into it so far. For a view, the ``version``
            that its base had when ``node`` was made: if it differs now, ``node`` is outdated.
        memory: None if the strides are certain. Otherwise says what is not known about the memory.
        fills: writes of numbers into this tensor that have no nodes yet (``fills.py``). None if all further
            writes get nodes at once.
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
        """The tensor of which this one is a view, or this tensor itself if it is no view."""
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
    # An assignment to ``data`` is refused: PyTorch would exchange the C++ tensor, but the attribute ``node``
    # would still be the node of the old one.
    data = property(lambda self: self.detach(), _refused("data"))

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Calls the op ``contiguous``: PyTorch's method may return the tensor itself, unseen by the trace."""
        return torch.ops.aten.contiguous.default(self, memory_format=memory_format)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"traced tensor of shape {self.metadata.shape}"


def make(
    m: Metadata, node: fx.Node, base: TracedTensor | None = None, path: tuple[Step, ...] = ()
) -> TracedTensor:
    # Traced tensors may stand for views of parameters. Such views are no inference tensors, not even in
    # inference mode. So traced tensors are none either.
    with torch.inference_mode(False):
        t: Any = private.make_wrapper(TracedTensor, m.shape, strides=m.stride, dtype=m.dtype, device=m.device)
    t.metadata, t.node, t.base, t.path = m, node, base, path
    t.version, t.memory, t.fills = 0 if base is None else base.version, None, []
    return t
