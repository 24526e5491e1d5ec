"""What can be derived from an op's declaration: a NamedTuple with one annotated field for each argument.

    class ScaleCall(NamedTuple):
        x: Annotated[Tensor, Operand("(N, C, *spatial)", whole=dense)]
        weight: Annotated[Tensor | None, Operand("(C,)")]
        activation: Annotated[str, Value(check_activation)]
        eps: float

Each function here derives one thing from such a class, for example the op's schema. ``ScaleCall`` is the
example in their docstrings. ``common/op.py`` and ``common/grad_op.py`` use the functions to register ops.

An instance of the class is a *call*: the op's arguments with their values.

Fields with defaults come last. They are not in the op's schema: only plans and kernels use these fields.
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
from sdfastgn.kernels.common.checks import check_input, check_operand

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

# Name of an operand -> its gradient. An unwanted gradient is None, or its name is missing.
Gradients = dict[str, Tensor | None]


# --- annotations ------------------------------------------------------------------------------------

# Values for ``Operand(whole=...)``. Each function stands for a memory layout that kernels can read. It
# returns its tensor itself if the tensor has this layout, else a copy with this layout. ``call`` is the op's
# call, with all its arguments. (A declaration cannot use a lambda instead: ``typing.get_type_hints`` does not
# resolve the names inside a lambda.)


def contiguous(t: Tensor, call: Any) -> Tensor:
    """``t``, or a contiguous copy if ``t`` is not contiguous. Any shape."""
    return t.contiguous()


def dense(x: Tensor, call: Any) -> Tensor:
    """``x`` (N, C, *spatial), or a copy without gaps if it is neither channels-last nor channels-first."""
    return layout.dense(x)


def channels_last(x: Tensor, call: Any) -> Tensor:
    """(N, C, *spatial) that lies as (N, *spatial, C) without gaps."""
    return x if x.movedim(1, -1).is_contiguous() else layout.laid_out(x, channels_last=True)


def even_rows(x: Tensor, call: Any) -> Tensor:
    """``x`` (..., D), or a contiguous copy if its rows are not contiguous or not evenly spaced."""
    return x.contiguous() if layout.row_stride(x) is None else x


class Operand:
    """Annotation of an argument that is a tensor.

    Args:
        shapes: the allowed shapes. A letter such as C has the same size as in the first operand's shape.
            ``*spatial`` and ``...`` stand for any number of axes. If no shape is given, the op's own check
            must check the shape.
        whole: one of the functions above, which returns the tensor in a layout that kernels can read.
            If it is None, kernels can read every layout.
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
    """Annotation of an argument that is not a tensor. ``check(public name, value)`` raises if it is wrong."""

    check: Callable[[str, Any], None]


# Annotations of a backward's last fields. A field ``dweight: Wanted`` is True if the gradient of ``weight``
# is wanted. A field ``dweight: WantedDtype`` is the dtype of the gradient, or None if it is not wanted.
_WANTED = "wanted"
Wanted = Annotated[bool, _WANTED]
WantedDtype = Annotated[torch.dtype | None, _WANTED]


class Field(NamedTuple):
    """One field of a declaration: ``Field("weight", 1, "Tensor?", Operand("(C,)"))``.

    ``place`` is its index, ``kind`` its type in the schema, and ``note`` its annotation or None.
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
    """The fields without a default, which are the arguments in the op's schema."""
    return tuple(field for field in fields_of(call_type) if field.name not in call_type._field_defaults)


def schema_of(name: str, call_type: Any, results: str) -> str:
    """The op's schema: ``scale(Tensor x, Tensor? weight, str activation, float eps) -> Tensor``"""
    arguments = ", ".join(f"{field.kind} {field.name}" for field in arguments_of(call_type))
    return f"{name}({arguments}) -> {results}"


def differentiable(call_type: Any) -> tuple[str, ...]:
    """Names of the operands that may have a gradient: ``("x", "weight")``."""
    return tuple(f.name for f in arguments_of(call_type) if f.is_tensor and f.note.has_gradient)


def passed_on(call_type: Any) -> tuple[str, ...]:
    """Names of the arguments that are neither tensors nor dtypes: ``("activation", "eps")``.

    The op's backward takes these arguments too.
    """
    return tuple(f.name for f in arguments_of(call_type) if not f.is_tensor and f.kind != "ScalarType?")


def gradients_of(grad_type: Any) -> tuple[str, ...]:
    """Names of the operands whose gradients a backward can compute: ``("x", "weight")``.

    ``grad_type``: the declaration of a backward.
    """
    return tuple(field.name[1:] for field in fields_of(grad_type) if field.note is _WANTED)


def backward_of(call_type: Any, saved: tuple[str, ...], dy: Operand, wanted: Any = Wanted) -> Any:
    """The declaration of the backward of an op that has one result with a gradient.

    ``backward_of(ScaleCall, ("mean",), ...)`` has the fields dy, x, mean, weight, activation, eps, dx,
    dweight. In this order:

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
    """A function ``check(public name, call)`` that raises if an argument is wrong.

    For ``ScaleCall`` it checks, in this order:

    - x is a floating tensor of rank 2 or more;
    - ``own(public name, call)``, the op's own check, does not raise;
    - ``check_activation`` does not raise;
    - weight is None, or a floating tensor of shape (C,) on the device of x.

    Raises TypeError and ValueError as in ``common/checks.py``, and what ``own`` raises.
    """
    first, *others = fields_of(call_type)
    (shape,) = first.note.shapes
    least = sum(part[0] not in "*." for part in _parts(shape))
    # Outside of ``check``, so that torch.compile does not trace this.
    values = [(field.name, field.note.check) for field in others if isinstance(field.note, Value)]
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
    """For each part of ``shape``: its number, or (start, stop) of the axes with the same name in ``first``.

    ``shape`` ``"(1, C, *spatial)"``, ``first`` ``"(N, C, *spatial)"`` -> ``[1, (1, 2), (2, None)]``
    """
    names = _parts(first)
    rest = next((i for i, name in enumerate(names) if name[0] in "*."), len(names))
    found: list[tuple[int, int | None] | int] = []
    for part in _parts(shape):
        if part.isdigit():
            found.append(int(part))
            continue
        place = names.index(part)
        # Axes behind ``*spatial`` or ``...`` are counted from the end, because ``*spatial`` has no fixed
        # length.
        start = place if place <= rest else place - len(names)
        stop = (place if place < rest else place - len(names)) + 1
        found.append((start, stop or None))
    return found


def _sizes(axes: list[tuple[int, int | None] | int], x: Tensor) -> tuple[int, ...]:
    """The shape that ``axes`` mean if ``x`` is the first operand. ``axes`` is a result of ``_axes``.

    ``axes`` ``[1, (1, 2)]``, ``x`` (2, 320, 64) -> ``(1, 320)``
    """
    found: tuple[int, ...] = ()
    for axis in axes:
        found += (axis,) if isinstance(axis, int) else tuple(x.shape[axis[0] : axis[1]])
    return found


def gaps_of(call: Any) -> tuple[tuple[int, Callable[[Tensor, Any], Tensor]], ...]:
    """(place, ``whole``) of each operand whose memory layout kernels cannot read.

    For example ``((0, dense),)`` if only the first operand has gaps.
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
    """``call`` with copies of the operands in ``gaps``, a result of ``gaps_of`` for this kind of call."""
    arguments = list(call)
    for place, whole in gaps:
        arguments[place] = whole(arguments[place], call)
    return type(call)(*arguments)


def empty_gradients(call: Any, names: tuple[str, ...]) -> Gradients:
    """Uninitialized gradients of the operands ``names``, with their shapes and dtypes.

    The gradient of x has the strides of x, which has no gaps. The others are contiguous. There is no gradient
    for an operand that is None.
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
    """Uninitialized gradients of the operands ``names``, for an op on rows: all contiguous.

    The gradient of x (..., D) has the shape of x, the others are (D,). Their dtypes are in the fields of
    ``call`` that are annotated with ``WantedDtype``.
    """
    x = call.x
    found: Gradients = {}
    for name in names:
        shape = x.shape if name == "x" else x.shape[-1:]
        found[name] = torch.empty(shape, dtype=getattr(call, f"d{name}"), device=x.device)
    return found
