"""Derives an op's schema, checks and gradients from its declaration.

A declaration is a NamedTuple class with one annotated field for each argument of the op:

    class ScaleCall(NamedTuple):
        x: Annotated[Tensor, Operand("(N, C, *spatial)", whole=dense)]
        weight: Annotated[Tensor | None, Operand("(C,)")]
        activation: Annotated[str, Value(check_activation)]
        eps: float

Most functions here derive one thing from such a class, for example the op's schema. ``ScaleCall`` is the
example in their docstrings. ``common/op.py`` and ``common/grad_op.py`` use them to register ops. The others
are values for ``Operand(whole=...)``, or prepare the tensors of a call.

An instance of such a class is a *call*: the values of the op's arguments.

Fields with defaults come last. They are not arguments in the op's schema: only plans and kernels use them.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from sdfastgn.kernels.common import layout
from sdfastgn.kernels.common.checks import as_float, as_index, check_bool, check_input, check_operand

# Annotation -> type in the op's schema.
_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    torch.dtype | None: "ScalarType?",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
}

# Type in the op's schema -> (Python's type, check of a value that has another type, such as NumPy's int).
# The check raises an error if PyTorch does not take the value.
NUMBERS: dict[str, tuple[type, Callable[[str, str, Any], object]]] = {
    "int": (int, as_index),
    "float": (float, as_float),
    "bool": (bool, check_bool),
}

# Name of an operand -> its gradient. An unwanted gradient is None, or its name is missing.
Gradients = dict[str, Tensor | None]


# --- annotations ------------------------------------------------------------------------------------

# Values for ``Operand(whole=...)``: functions for the memory layouts that kernels of several ops read. Some
# ops have further functions of their own. A function returns the tensor itself if the tensor has its layout,
# else a copy with this layout. ``call`` is the op's call, with all its arguments.


def contiguous(t: Tensor, call: Any) -> Tensor:
    """Returns ``t``, or a contiguous copy if ``t`` is not contiguous. ``t`` may have any shape."""
    return t.contiguous()


def dense(x: Tensor, call: Any) -> Tensor:
    """Returns ``x`` (N, C, *spatial), or a copy if it is neither channels-last nor channels-first."""
    return layout.dense(x)


def channels_last(x: Tensor, call: Any) -> Tensor:
    """Returns ``x`` (N, C, *spatial), or a channels-last copy if its memory order is not (N, *spatial, C)."""
    return x if x.movedim(1, -1).is_contiguous() else layout.laid_out(x, channels_last=True)


def dense_rows(x: Tensor, call: Any) -> Tensor:
    """Returns ``x`` (..., D), or a contiguous copy if the elements of a row are not neighbors in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def even_rows(x: Tensor, call: Any) -> Tensor:
    """Returns ``x`` (..., D), or a contiguous copy if kernels cannot read its rows (``row_stride``)."""
    return x.contiguous() if layout.row_stride(x) is None else x


class Operand:
    """Annotation of an argument that is a tensor.

    Args:
        shapes: the allowed shapes. A letter such as C means the same size in all operands of the op.
            ``*spatial`` and ``...`` match zero or more axes. If no shape is given, the op's own check must
            check the shape.
        whole: function that returns the tensor in a layout that kernels can read, such as ``contiguous`` or
            ``dense`` of this file. None if kernels can read every layout.
        has_gradient: True if autograd may ask for the tensor's gradient.
        same_dtype: True if the tensor must have the dtype of the first operand.
        label: name in errors. Default: the name of the field.
    """

    def __init__(
        self,
        *shapes: str,
        whole: Callable[[Tensor, Any], Tensor] | None = contiguous,
        has_gradient: bool = True,
        same_dtype: bool = False,
        label: str | None = None,
    ) -> None:
        self.shapes, self.whole, self.label = shapes, whole, label
        self.has_gradient, self.same_dtype = has_gradient, same_dtype


class Value(NamedTuple):
    """Annotation of an argument that is not a tensor.

    ``check(public name, value)`` raises an error if the value is wrong.
    """

    check: Callable[[str, Any], None]


# Annotations of the last fields of a backward's declaration. The value of a field ``dweight: Wanted`` is True
# if the gradient of ``weight`` is wanted. The value of a field ``dweight: WantedDtype`` is the dtype of the
# gradient, or None if the gradient is not wanted.
_WANTED = "wanted"
Wanted = Annotated[bool, _WANTED]
WantedDtype = Annotated[torch.dtype | None, _WANTED]


class Field(NamedTuple):
    """One field of a declaration, for example ``Field("weight", 1, "Tensor?", Operand("(C,)"))``.

    ``place``: index of the field. ``kind``: its type in the op's schema. ``note``: its annotation, or None.
    """

    name: str
    place: int
    kind: str
    note: Any

    @property
    def is_tensor(self) -> bool:
        return "Tensor" in self.kind


@functools.cache
def fields_of(call_type: Any) -> tuple[Field, ...]:
    """All fields of a declaration, including those with defaults."""
    hints = typing.get_type_hints(call_type, include_extras=True)
    found = []
    for place, name in enumerate(call_type._fields):
        hint, note = hints[name], None
        if typing.get_origin(hint) is Annotated:
            hint, (note,) = hint.__origin__, hint.__metadata__
        kind = "Tensor?" if hint is NoneType else _KINDS[hint]
        note = Operand() if note is None and "Tensor" in kind else note
        found.append(Field(name, place, kind, note))
    return tuple(found)


# --- derived from a declaration ---------------------------------------------------------------------


def arguments_of(call_type: Any) -> tuple[Field, ...]:
    """The fields of a declaration that have no default: the arguments in the op's schema."""
    return tuple(field for field in fields_of(call_type) if field.name not in call_type._field_defaults)


def schema_of(name: str, call_type: Any, results: str) -> str:
    """The op's schema, such as ``scale(Tensor x, Tensor? weight, str activation, float eps) -> Tensor``."""
    arguments = ", ".join(f"{field.kind} {field.name}" for field in arguments_of(call_type))
    return f"{name}({arguments}) -> {results}"


def differentiable(call_type: Any) -> tuple[str, ...]:
    """Names of the operands that may have a gradient. For ``ScaleCall``: ``("x", "weight")``."""
    return tuple(f.name for f in arguments_of(call_type) if f.is_tensor and f.note.has_gradient)


def passed_on(call_type: Any) -> tuple[str, ...]:
    """Names of the arguments that are neither tensors nor dtypes. The op's backward takes them too.

    For ``ScaleCall``: ``("activation", "eps")``.
    """
    return tuple(f.name for f in arguments_of(call_type) if not f.is_tensor and f.kind != "ScalarType?")


def gradients_of(grad_type: Any) -> tuple[str, ...]:
    """Names of the operands whose gradients a backward can compute. For ``ScaleCall``: ``("x", "weight")``.

    ``grad_type``: the declaration of the backward.
    """
    return tuple(field.name[1:] for field in fields_of(grad_type) if field.note is _WANTED)


def backward_of(call_type: Any, saved: tuple[str, ...], dy: Operand, wanted: Any = Wanted) -> Any:
    """Returns the declaration of an op's backward. The op must have one result with a gradient.

    For example, ``backward_of(ScaleCall, ("mean",), ...)`` has the fields dy, x, mean, weight, activation,
    eps, dx, dweight. The order of the fields is:

    - the gradient of the result;
    - the op's first operand;
    - the tensors that the forward saved;
    - the other operands that may have a gradient;
    - the op's arguments that are neither tensors nor dtypes;
    - for each operand that may have a gradient, whether it is wanted.

    Args:
        call_type: the declaration of the op.
        saved: names of the saved tensors.
        dy: the annotation of the result's gradient.
        wanted: ``Wanted`` or ``WantedDtype``.
    """
    hints = typing.get_type_hints(call_type, include_extras=True)
    first, *others = differentiable(call_type)
    fields = [("dy", Annotated[Tensor, dy]), (first, hints[first])]
    fields += [(name, Tensor) for name in saved]
    fields += [(name, hints[name]) for name in (*others, *passed_on(call_type))]
    fields += [(f"d{name}", wanted) for name in (first, *others)]
    return NamedTuple(call_type.__name__.replace("Call", "GradCall"), fields)


def checks_of(call_type: Any, own: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """Returns a function ``check(public name, call)`` that raises an error if an argument is wrong.

    For ``ScaleCall`` this function checks, in this order:

    - x is a floating tensor of rank 2 or more;
    - ``own(public name, call)``, the op's own check, does not raise;
    - ``check_activation`` does not raise;
    - eps is a number;
    - weight is None, or a floating tensor of shape (C,) on the device of x.

    It raises TypeError and ValueError as in ``common/checks.py``, and what ``own`` raises.
    """
    first, *others = fields_of(call_type)
    (shape,) = first.note.shapes
    least = sum(part[0] not in "*." for part in _parts(shape))
    # torch.compile traces ``check``. So what does not depend on the call is computed here, outside of it.
    values = [(field.name, field.note.check) for field in others if isinstance(field.note, Value)]
    numbers = [(field.name, *NUMBERS[field.kind]) for field in others if field.kind in NUMBERS]
    operands = [
        (field, field.note.label or field.name, [_axes(text, shape) for text in field.note.shapes])
        for field in others
        if field.is_tensor
    ]

    def check(public_name: str, call: Any) -> None:
        x: Any = call[0]
        check_input(public_name, first.name, x)
        if x.dim() < least:
            raise ValueError(f"{public_name}: {first.name} must be {shape}, got shape {tuple(x.shape)}")
        own(public_name, call)
        for name, check_value in values:
            check_value(public_name, getattr(call, name))
        for name, expected, check_number in numbers:
            value = getattr(call, name)
            if type(value) is not expected:
                check_number(public_name, name, value)
        for field, label, shapes in operands:
            t = getattr(call, field.name)
            if field.kind == "Tensor":
                check_input(public_name, label, t)
            if field.note.same_dtype and isinstance(t, Tensor) and t.dtype != x.dtype:
                raise TypeError(f"{public_name}: {label} must have the dtype {x.dtype}, got {t.dtype}")
            if shapes:
                check_operand(public_name, label, t, x, *[_sizes(axes, x) for axes in shapes])

    return check


def _parts(shape: str) -> list[str]:
    """``"(N, C, *spatial)"`` -> ``["N", "C", "*spatial"]``"""
    return [part.strip() for part in shape.strip("()").split(",") if part.strip()]


def _axes(shape: str, first: str) -> list[tuple[int, int | None] | int]:
    """Translates each part of ``shape``. A number stays as it is. A name becomes the place of its axes.

    The place is (start, stop), the indices of the axes with this name in ``first``. For example, ``shape``
    ``"(1, C, *spatial)"`` and ``first`` ``"(N, C, *spatial)"`` give ``[1, (1, 2), (2, None)]``.
    """
    names = _parts(first)
    rest = next((i for i, name in enumerate(names) if name[0] in "*."), len(names))
    found: list[tuple[int, int | None] | int] = []
    for part in _parts(shape):
        if part.isdigit():
            found.append(int(part))
            continue
        place = names.index(part)
        # ``*spatial`` and ``...`` stand for any number of axes, so axes after them are counted from the end.
        start = place if place <= rest else place - len(names)
        stop = (place if place < rest else place - len(names)) + 1
        found.append((start, stop or None))
    return found


def _sizes(axes: list[tuple[int, int | None] | int], x: Tensor) -> tuple[int, ...]:
    """The shape that an operand must have. ``axes``: result of ``_axes`` for it. ``x``: the first operand.

    For example, ``axes`` ``[1, (1, 2)]`` and ``x`` of shape (2, 320, 64) give ``(1, 320)``.
    """
    found: tuple[int, ...] = ()
    for axis in axes:
        found += (axis,) if isinstance(axis, int) else tuple(x.shape[axis[0] : axis[1]])
    return found


def gaps_of(call: Any) -> tuple[tuple[int, Callable[[Tensor, Any], Tensor]], ...]:
    """Finds the operands whose memory layout kernels cannot read, and returns (index, ``whole``) for each.

    For example ``((0, dense),)`` if only the first operand has gaps, and its annotation has ``whole=dense``.
    """
    call_type: Any = type(call)
    return tuple(
        (field.place, field.note.whole)
        for field in fields_of(call_type)
        if field.is_tensor and field.note.whole is not None
        for t in (call[field.place],)
        if t is not None and field.note.whole(t, call) is not t
    )


def without_gaps(call: Any, gaps: tuple[tuple[int, Callable[[Tensor, Any], Tensor]], ...]) -> Any:
    """Returns ``call`` with copies of the operands in ``gaps``, so that kernels can read all operands.

    ``gaps``: the result of ``gaps_of(call)``.
    """
    arguments = list(call)
    for place, whole in gaps:
        arguments[place] = whole(arguments[place], call)
    return type(call)(*arguments)


def empty_gradients(call: Any, names: tuple[str, ...]) -> Gradients:
    """Uninitialized tensors for the gradients of the operands ``names``, with their shapes and dtypes.

    The gradient of x has the strides of x, which must have no gaps. All other gradients are contiguous. An
    operand that is None gets no gradient.
    """
    found: Gradients = {}
    for name in names:
        t = getattr(call, name)
        if name == "x":
            found[name] = torch.empty_like(t)
        elif t is not None:
            found[name] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    return found


def empty_row_gradients(call: Any, names: tuple[str, ...]) -> Gradients:
    """Uninitialized contiguous tensors for the gradients of the operands ``names``, for an op on rows.

    The gradient of x (..., D) has the shape of x. All other gradients have the shape (D,). The fields of
    ``call`` that are annotated with ``WantedDtype`` give the dtypes.
    """
    x = call.x
    found: Gradients = {}
    for name in names:
        shape = x.shape if name == "x" else x.shape[-1:]
        found[name] = torch.empty(shape, dtype=getattr(call, f"d{name}"), device=x.device)
    return found
