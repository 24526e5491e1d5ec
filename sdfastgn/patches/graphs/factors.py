"""Turns numbers that users change between two images into inputs of CUDA graphs.

A graph repeats the numbers of its capture. Some numbers are inputs instead, and are called *factors*: FreeU's
four numbers and the scale of an IP-Adapter, which are attributes of modules, and the scale of a ControlNet,
which is an argument. A factor may be a number of Python or of NumPy. diffusers multiplies tensors by a factor
or writes it into a tensor, and otherwise only asks whether the factor is 0.

While a call is captured, a ``Factor`` replaces each of these numbers. It is a float, but operations of
PyTorch read its value from memory on the device. New values are written into this memory before a replay, so
they need no new capture.

A number is a factor only if the installed code that reads it was tested (``tested_sources.py``). In graphs
with gradients only arguments are factors (``TrainingGraph.has_factors``). A new value of any other number
leads to a new capture.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdfastgn.patches.graphs.changes import Place, changed
from sdfastgn.patches.swap.fusion import stock_class
from sdfastgn.patches.swap.numpy_numbers import is_numpy_real
from sdfastgn.patches.swap.tested_sources import TestedSource, tested, unknown_source

_WIDE = (torch.float64, torch.complex128)
_PRODUCTS = (Tensor.mul, torch.mul)


class Factor(float):
    """A float whose value captured operations read from memory, so that a replay can use another value.

    Args:
        value: the present value, which Python code reads.
        memory: the value on the device, fp64, of the shape (1,).
        rounded: the same value in fp32. PyTorch multiplies tensors of fp16, bf16 and fp32 in this precision.
    """

    def __new__(cls, value: float, memory: Tensor, rounded: Tensor) -> Factor:
        factor = super().__new__(cls, value)
        factor._memory, factor._rounded = memory, rounded
        factor._thread = threading.get_ident()
        return factor

    _memory: Tensor
    _rounded: Tensor
    _thread: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """PyTorch calls this method instead of ``func`` if an argument is a ``Factor``.

        The method computes a product with the factor, or writes the factor into a tensor. It raises TypeError
        for other functions. In a thread that does not capture, it calls ``func`` with a plain number.
        """
        *tensors, factor = args
        if not isinstance(factor, cls):
            raise TypeError(f"{func.__name__} reads a number that a graph takes as an input")
        # In a thread other than the capturing one, the model runs eagerly and needs a plain number.
        if factor._thread != threading.get_ident():
            return func(*tensors, float(factor), **(kwargs or {}))
        x = tensors[0]
        value = factor._memory if x.dtype in _WIDE else factor._rounded
        if func is Tensor.__setitem__:
            x[tensors[1]] = value
            return None
        if func not in _PRODUCTS or kwargs:
            raise TypeError(f"{func.__name__} reads a number that a graph takes as an input")
        # With as many dimensions as ``x``, the factor makes PyTorch multiply in fp32 and round once, as with
        # a Python number. A factor without dimensions would first be rounded to the dtype of ``x``.
        value, dtype = value.view((1,) * x.dim()), torch.result_type(x, 1.0)
        # With ``out`` the product gets its final dtype in one kernel, but autograd does not support ``out``.
        if torch.is_grad_enabled():
            return torch.mul(x, value).to(dtype)
        return torch.mul(x, value, out=torch.empty_like(x, dtype=dtype))


class Reader(NamedTuple):
    """A class of diffusers whose code multiplies tensors by *factors*: numbers that are inputs of graphs.

    Attributes:
        name: full name of the class.
        method: the method that reads the factors.
        attributes: names of the class's attributes that are factors, or lists of factors. Empty if the
            factors are arguments of the method.
        functions: functions, in the Python module of the class, to which the method passes factors.
        parts: classes, in the same Python module, to whose ``forward`` the method passes factors.
    """

    name: str
    method: str
    attributes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[TestedSource, ...]:
        """The methods and functions that read the factors.

        If the installed code of one of them was never tested, the numbers are constants of graphs.
        """
        path, _, kind = self.name.rpartition(".")
        module = importlib.import_module(path)
        found = [tested(getattr(module, kind), self.method)]
        found += [tested(getattr(module, part), "forward") for part in self.parts]
        if self.functions:
            torch_utils = importlib.import_module("diffusers.utils.torch_utils")
            found += [tested(module, *self.functions), tested(torch_utils, "fourier_filter")]
        return tuple(found)


def _with_freeu(path: str, *names: str) -> list[Reader]:
    attributes, functions = ("s1", "s2", "b1", "b2"), ("apply_freeu",)
    return [
        Reader(f"diffusers.models.unets.{path}.{name}", "forward", attributes, functions) for name in names
    ]


_READERS = {
    reader.name: reader
    for reader in (
        *_with_freeu("unet_2d_blocks", "UpBlock2D", "CrossAttnUpBlock2D"),
        *_with_freeu("unet_3d_blocks", "UpBlock3D", "CrossAttnUpBlock3D"),
        *_with_freeu("unet_motion_model", "UpBlockMotion", "CrossAttnUpBlockMotion"),
        Reader("diffusers.models.attention_processor.IPAdapterAttnProcessor", "__call__", ("scale",)),
        Reader("diffusers.models.attention_processor.IPAdapterAttnProcessor2_0", "__call__", ("scale",)),
        Reader("diffusers.models.controlnets.controlnet.ControlNetModel", "forward"),
        Reader("diffusers.models.controlnets.controlnet_union.ControlNetUnionModel", "forward"),
        Reader(
            "diffusers.models.controlnets.controlnet_xs.UNetControlNetXSModel",
            "forward",
            parts=tuple(f"ControlNetXSCrossAttn{block}2D" for block in ("DownBlock", "MidBlock", "UpBlock")),
        ),
    )
}


def readers() -> tuple[Reader, ...]:
    """A ``Reader`` for each class of diffusers that multiplies tensors by numbers that are graph inputs."""
    return tuple(_READERS.values())


def _reader_of(module: nn.Module) -> Reader | None:
    """The ``Reader`` that names the factors of the class of ``module``.

    None if there is none, or if the installed code of the class, which reads the factors, was never tested.
    """
    kind = stock_class(module)
    reader = _READERS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if reader is None or unknown_source(*reader.sources) else reader


def is_tested(module: nn.Module) -> bool:
    """True if numbers among the arguments of ``module`` may be inputs of its CUDA graphs.

    That is, ``readers`` names the class of ``module``, and the installed code that reads the numbers was
    tested.
    """
    return _reader_of(module) is not None


def is_number(value: Any) -> bool:
    """True for an int, a float or a real number of NumPy. No other value may be replaced by a ``Factor``.

    Some code of diffusers raises an error for NumPy's numbers. A user usually still gets this error, because
    a model runs without a graph before its first capture.
    """
    kind = type(value)
    return kind in (int, float) or is_numpy_real(kind)


class Factors:
    """All attributes of a model's modules that are *factors*: numbers that are inputs of the model's graphs.

    It has the same methods as the classes in ``comparisons.py``, which look for changes of a model. If a
    factor gets a new value, the graphs stay valid. But a factor must not become 0, and must stay 0 if it was:
    diffusers' code may run other kernels for 0.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._places: list[Place] = []
        # A number or a list of numbers for each attribute: the values that ``_memory`` has.
        self._values: list[Any] = []
        # Two tensors on the GPU, fp64 and fp32. Both have all numbers, which the graphs read from them.
        self._memory: tuple[Tensor, ...] = ()

    def add(self, path: str, module: nn.Module) -> tuple[str, ...]:
        """Add the attributes of ``module`` that are factors to this object, and return their names.

        A factor is a number that CUDA graphs read from memory.
        """
        reader, attributes = _reader_of(module), vars(module)
        names = () if reader is None else reader.attributes
        found = tuple(name for name in names if _are_numbers(attributes.get(name)))
        for name in found:
            self._dicts.append(attributes)
            self._names.append(name)
            self._places.append(Place(path, "attribute", attributes, ()))
        return found

    def freeze(self) -> None:
        self._values = _copy(self._now())
        self._forms = list(map(_form, self._values))

    def same(self) -> bool:
        """True if the graphs are still valid: the same factors are 0 as when ``freeze`` was called.

        Lists of factors must also have kept their lengths. Other new values do not matter.
        """
        now = self._now()
        return now == self._values or list(map(_form, now)) == self._forms

    def difference(self) -> str | None:
        for attributes, name, place, old, form in zip(
            self._dicts, self._names, self._places, self._values, self._forms, strict=True
        ):
            new = attributes.get(name)
            if _form(new) != form:
                return changed(place.noun(name), old, new)
        return None

    def allocate(self, device: torch.device) -> None:
        """Allocate the GPU memory from which graphs read all factors, and write their values into it."""
        if self._names and not self._memory:
            count = len(list(_flat(self._values)))
            with torch.inference_mode(False):
                self._memory = tuple(
                    torch.empty(count, dtype=dtype, device=device) for dtype in (torch.float64, torch.float32)
                )
            self._write()

    def are_written(self) -> bool:
        """True if the memory that graphs read has the attributes' present values."""
        try:
            return self._now() == self._values
        except Exception:  # an attribute was deleted, or ``==`` of a user's class raised
            return False

    def refresh(self) -> bool:
        """Write the attributes' present values into the memory that graphs read, in the current stream.

        Returns False, and writes nothing, if the graphs are invalid: a factor has become 0, a factor that was
        0 has another value, or an attribute no longer holds a number.
        """
        if not self._memory or self.are_written():
            return True
        try:
            now = _copy(self._now())
            if list(map(_form, now)) != self._forms:
                return False
        except LookupError:
            return False
        self._values = now
        self._write()
        return True

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """A context, for a capture, in which a ``Factor`` replaces each number in the added attributes.

        ``allocate`` must have been called.
        """
        places = itertools.count()
        with contextlib.ExitStack() as stack:
            for attributes, name in zip(self._dicts, self._names, strict=True):
                self._replace(attributes, name, places, stack)
            yield

    def _replace(self, container: Any, key: Any, places: Iterator[int], stack: contextlib.ExitStack) -> None:
        value = container[key]
        if type(value) is list:
            for index in range(len(value)):
                self._replace(value, index, places, stack)
            return
        place = next(places)
        factor = Factor(value, *(values[place : place + 1] for values in self._memory))

        def put_back() -> None:
            with contextlib.suppress(LookupError):
                # The former number is put back, unless another thread has set a new one during the capture.
                if container[key] is factor:
                    container[key] = value

        container[key] = factor
        stack.callback(put_back)

    def _now(self) -> list[Any]:
        return list(map(dict.__getitem__, self._dicts, self._names))

    def _write(self) -> None:
        memory, rounded = self._memory
        values = torch.tensor(list(_flat(self._values)), dtype=torch.float64, device="cpu")
        memory.copy_(values, non_blocking=True)
        rounded.copy_(memory)


def _are_numbers(value: Any) -> bool:
    return is_number(value) or (type(value) is list and value != [] and all(map(_are_numbers, value)))


def _form(value: Any) -> Any:
    """Returns what must not change in an attribute's value, because the graphs would become invalid.

    That is, whether a number is 0, and how long a list is.
    """
    if type(value) is list:
        return list(map(_form, value))
    return value != 0 if is_number(value) else None


def _copy(value: Any) -> Any:
    return list(map(_copy, value)) if type(value) is list else value


def _flat(values: list[Any]) -> Iterator[float]:
    for value in values:
        if type(value) is list:
            yield from _flat(value)
        else:
            yield value
