"""Separates the tensors in a call's arguments from all other values, and makes a key of the call.

Calls with equal keys can share a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from numbers import Integral
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from sdfastgn.kernels.common.private import copy_each, default_device, sdp_priority_order, switches
from sdfastgn.patches.graphs.factors import Factor, is_number
from sdfastgn.patches.swap.numpy_numbers import is_numpy_constant

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict)

_INITIAL_ORDER = tuple(sdp_priority_order())
_CUDNN = SDPBackend.CUDNN_ATTENTION.value
# The two orders of attention backends that PyTorch uses if the user sets none. On some GPUs PyTorch moves
# cuDNN to the front at the first call of attention. Both orders count as equal, so that this change of
# PyTorch's own leads to no new capture of a CUDA graph.
_UNTOUCHED_ORDERS = (_INITIAL_ORDER, (_CUDNN, *(backend for backend in _INITIAL_ORDER if backend != _CUDNN)))


class Unsupported(Exception):  # noqa: N818  # not an error: the call runs without a graph
    """Raised if a module's call must run without a CUDA graph. ``sdfastgn.report`` shows the message."""


class Number(NamedTuple):
    """Describes an argument that may be a number, such as a timestep. One CUDA graph serves all its values.

    Attributes:
        position: index of the argument if it is positional.
        float_dtype: dtype of the 0-d tensor that a graph gets instead of a float. The model's forward would
            itself turn the float into a tensor of this dtype.
        is_factor: True if a graph gets no 0-d tensor but a ``Factor``: a float whose value the graph reads
            from GPU memory (``factors.py``). The argument may then also be a list of numbers.
    """

    position: int
    float_dtype: torch.dtype = torch.float64
    is_factor: bool = False


class _Slot(NamedTuple):
    """Marks where a tensor was in a call's arguments. ``place``: the tensor's index in ``Call.tensors``."""

    place: int


class _FactorSlot(NamedTuple):
    """Takes the place of a number in a call's arguments, if a CUDA graph reads the number from GPU memory.

    ``place``: the number's index in ``Call.tensors``. ``value``: the number.
    """

    place: int
    value: float


class _Spec(NamedTuple):
    """Describes a tensor. Tensors with equal descriptions can be arguments of the same CUDA graph."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    # True if the tensor is a conjugate or negative view: PyTorch computes its values only when they are read.
    is_lazy: bool = False


class Call:
    """The arguments of one call, with their tensors separated from the lists, tuples and dicts around them.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        numbers: name of an argument -> ``Number``, for each argument that may be a number.

    Attributes:
        key: hashable. Calls with equal keys can share a graph: their arguments have the same structure,
            shapes, strides, dtypes, device and plain values.
        tensors: the tensors, in the order in which they occur in the arguments. Numbers in the arguments that
            ``numbers`` names are in this list too.
        device: the device of all tensors.

    Raises Unsupported if there is no tensor, for tensors on several devices, and for objects other than
    tensors, plain values, lists, tuples and dicts. A 0-d tensor on the CPU counts as a number if ``numbers``
    names its argument, and if the ``is_factor`` of this argument is False.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: Mapping[str, Number]
    ) -> None:
        self.tensors: list[Tensor | int | float] = []
        self.device: torch.device | None = None
        self._specs: list[_Spec] = []
        tokens: list[Any] = []
        number_at = {number.position: number for number in numbers.values()}
        parts = [self._take(value, tokens, f"argument {i}", number_at.get(i)) for i, value in enumerate(args)]
        named = {}
        for name, value in kwargs.items():
            tokens.append(name)
            named[name] = self._take(value, tokens, name, numbers.get(name))
        if self.device is None:
            raise Unsupported("it was called without a tensor")
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] = args, kwargs
        self._args: list[Any] = parts
        self._kwargs: dict[str, Any] = named
        self.key: tuple[Any, ...] = (len(args), tuple(tokens), self.device)

    def buffers(self) -> list[Tensor]:
        """Returns new uninitialized tensors with the shapes, strides and dtypes of the call's tensors."""
        return [_like(spec, self.device) for spec in self._specs]

    def fill(self, buffers: list[Tensor]) -> None:
        """Copy the values of the call's tensors and numbers into ``buffers``."""
        targets, sources = [], []
        for buffer, value in zip(buffers, self.tensors, strict=True):
            if isinstance(value, Tensor):
                targets.append(_written_part(buffer))
                sources.append(_written_part(value.detach()))
            else:
                buffer.fill_(value)
        if targets:
            copy_each(targets, sources)

    def as_tensors(self) -> list[Tensor]:
        """Returns the call's tensors, and a 0-d tensor on ``device`` for each of its numbers."""
        return [
            value
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=spec.dtype, device=self.device)
            for value, spec in zip(self.tensors, self._specs, strict=True)
        ]

    def rebuild(self, buffers: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Returns (args, kwargs) of the call, with ``buffers`` in place of the call's tensors.

        The lists and dicts in the arguments are new objects.
        """
        return [_fill_in(p, buffers) for p in self._args], {
            k: _fill_in(v, buffers) for k, v in self._kwargs.items()
        }

    def lists(self) -> list[list[Any]]:
        """All lists in the arguments, also nested ones. They are the caller's objects, not copies."""
        args, kwargs = self._given
        return lists_in(*args, kwargs)

    def _take(self, value: Any, tokens: list[Any], path: str, number: Number | None = None) -> Any:
        """Separates the tensors in ``value`` from the rest. Appends a description of ``value`` to ``tokens``.

        Returns ``value`` with a ``_Slot`` or ``_FactorSlot`` in place of each tensor, and of a number that
        ``number`` describes.

        Args:
            value: an argument, or a part of an argument.
            tokens: the descriptions of all arguments so far. They become a part of ``key``.
            path: name of the argument, for errors.
            number: describes the argument if it may be a number; else None.
        """
        kind = type(value)
        if number is not None and number.is_factor:
            if is_number(value):
                tokens.append(Factor)
                return _FactorSlot(self._slot(value, _Spec((1,), (1,), torch.float64), tokens).place, value)
            if kind is list:
                tokens.append((kind, len(value)))
                return [self._take(item, tokens, path, number) for item in value]
        elif number is not None:
            if kind is Tensor and value.device.type == "cpu" and value.dim() == 0:
                return self._slot(value.item(), _Spec((), (), value.dtype), tokens)
            # A number becomes a tensor of the dtype to which diffusers' forward would convert it. For NumPy's
            # numbers, except integers and ``np.float64``, the forward raises an error: they stay as they are.
            if is_number(value) and isinstance(value, (float, Integral)):
                dtype = number.float_dtype if isinstance(value, float) else torch.int64
                spec = _Spec((), (), dtype)
                return self._slot(value if dtype.is_floating_point else int(value), spec, tokens)
        if kind in (Tensor, torch.nn.Parameter):
            if self.device is None:
                self.device = value.device
            elif value.device != self.device:
                raise Unsupported(f"{path} has a tensor on {value.device}, others are on {self.device}")
            if value.layout is not torch.strided:
                raise Unsupported(f"{path} has a tensor of layout {value.layout}")
            is_lazy = value.is_conj() or value.is_neg()
            spec = _Spec(tuple(value.shape), _strides_of(value), value.dtype, is_lazy)
            return self._slot(value, spec, tokens)
        if is_plain(kind):
            # Zeros and NaN are compared as text, because -0.0 equals 0.0, and NaN does not equal itself.
            is_special = kind is float and (value == 0 or value != value)
            tokens.append((kind, str(value) if is_special else value))
            return value
        if kind not in _CONTAINERS:
            raise Unsupported(f"{path} has a {kind.__name__}")
        tokens.append((kind, len(value)))
        if kind is dict:
            taken = {}
            for key, item in value.items():
                tokens.append((type(key), key))
                taken[key] = self._take(item, tokens, path)
            return taken
        return kind([self._take(item, tokens, path) for item in value])

    def _slot(self, value: Any, spec: _Spec, tokens: list[Any]) -> _Slot:
        tokens.append(spec)
        self.tensors.append(value)
        self._specs.append(spec)
        return _Slot(len(self.tensors) - 1)


def is_plain(kind: type) -> bool:
    """True if values of the class ``kind``, such as numbers and strings, become constants in a CUDA graph."""
    return kind in _PLAIN or issubclass(kind, enum.Enum) or is_numpy_constant(kind)


def _strides_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of ``tensor``, for the comparison of calls.

    The stride of a batch of 1 has no effect, and may differ if ``tensor`` is a view of a larger tensor. So it
    is replaced by the stride that a tensor of this shape has if it is no view.
    """
    strides = tensor.stride()
    if not strides or len(tensor) != 1:
        return strides
    return max(map(mul, tensor.shape[1:], strides[1:]), default=1), *strides[1:]


def _like(spec: _Spec, device: torch.device | None) -> Tensor:
    if spec.is_lazy:
        raise Unsupported("a tensor is a lazy conjugate or negative")
    # An expanded dimension has stride 0: all its elements share the memory of one element. Only the memory of
    # this element is allocated, and the new tensor is expanded too.
    once = [1 if stride == 0 else n for n, stride in zip(spec.shape, spec.stride, strict=True)]
    return torch.empty_strided(once, spec.stride, dtype=spec.dtype, device=device).expand(spec.shape)


def _written_part(tensor: Tensor) -> Tensor:
    if 0 not in tensor.stride():
        return tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _fill_in(part: Any, buffers: list[Tensor]) -> Any:
    kind = type(part)
    if kind is _Slot:
        return buffers[part.place]
    if kind is _FactorSlot:
        memory = buffers[part.place]
        return Factor(part.value, memory, memory.float())
    if kind is dict:
        return {key: _fill_in(item, buffers) for key, item in part.items()}
    if kind in (list, tuple):
        return kind([_fill_in(item, buffers) for item in part])
    return part


def global_state(device: torch.device) -> tuple[Any, ...]:
    """The values of PyTorch's global settings that change a call's kernels or its result."""
    kind = device.type
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        default_device(),
        torch.are_deterministic_algorithms_enabled(),
        None if (order := tuple(sdp_priority_order())) in _UNTOUCHED_ORDERS else order,
        *[switch() for switch in switches],
    )


def mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Returns ``value`` in new containers, with each tensor t in it replaced by ``fn(t)``.

    Raises Unsupported if ``value`` contains anything but tensors, plain values, lists, tuples, dicts and
    outputs of diffusers or transformers (dataclasses that are dicts).
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return fn(value)
    if is_plain(kind):
        return value
    if kind in (list, tuple):
        return kind([mapped(item, fn) for item in value])
    if kind is dict:
        return {key: mapped(item, fn) for key, item in value.items()}
    # A model of diffusers may return a BaseOutput, which is both a dataclass and a dict. The new one is built
    # from the fields of the dataclass.
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: mapped(getattr(value, name), fn) for name in names})
    raise Unsupported(f"it returns a {kind.__name__}")


def tensors_in(output: Any) -> list[Tensor]:
    """Returns each tensor in ``output`` once.

    Raises Unsupported if ``output`` contains an object that is no tensor, no constant and no container.
    """
    found: dict[int, Tensor] = {}
    mapped(output, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def static_copy(output: Any) -> Any:
    """Returns ``output`` in new containers, with the same tensors.

    Raises Unsupported if ``output`` contains an object that is no tensor, no constant and no container.
    """
    return mapped(output, lambda tensor: tensor)


def clone_of(output: Any) -> Any:
    """Returns ``output`` with copies of its tensors, which no later replay of a CUDA graph overwrites.

    A tensor that occurs twice is copied once. Raises Unsupported if ``output`` contains an object that is no
    tensor, no constant and no container.
    """
    clones: dict[int, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        if id(tensor) not in clones:
            clones[id(tensor)] = tensor.clone()
        return clones[id(tensor)]

    return mapped(output, clone)


def lists_in(*values: Any) -> list[list[Any]]:
    """All lists in ``values``, also nested ones, in the order in which they occur."""
    found: list[list[Any]] = []
    for value in values:
        if type(value) is list:
            found.append(value)
        if type(value) in _CONTAINERS:
            found += lists_in(*(value.values() if type(value) is dict else value))
    return found


def structure_of(*values: Any) -> Any:
    """Returns ``values`` as nested lists, with the id of each object that is no list, tuple or dict.

    It shows whether a call of a module has changed a list or dict in ``values``: then ``structure_of`` has
    another result after the call than before the call.
    """
    return [
        structure_of(*(v.items() if isinstance(v, dict) else v))
        if isinstance(v, (list, tuple, dict))
        else id(v)
        for v in values
    ]
