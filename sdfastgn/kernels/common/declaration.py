"""One declaration per op: a NamedTuple of its arguments, whose annotations say what each of them is.

    class ScaleCall(NamedTuple):
        x: Annotated[Tensor, Operand("(N, C, *spatial)", whole=dense)]
        weight: Annotated[Tensor | None, Operand("(C,)")]
        activation: Annotated[str, Value(check_activation)]
        eps: float

Each function here makes one thing of such a class; their examples are of this one. ``common/op.py``
and ``common/grad_op.py`` put these together.

Fields with defaults come last. They are no arguments of the op: only the kernels know them.
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

# What an annotation is called in a schema.
_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    torch.dtype | None: "ScalarType?",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
}

# Gradients by the names of their operands. One that is not wanted is None, or missing.
Gradients = dict[str, Tensor | None]


# --- what an annotation says ------------------------------------------------------------------------

# How kernels want an operand to lie in memory. Each function takes a tensor and its call, and returns the
# tensor itself if it lies so, else a copy. An annotation cannot have a lambda: names are not resolved in it.


def contiguous(t: Tensor, call: Any) -> Tensor:
    return t.contiguous()


def dense(x: Tensor, call: Any) -> Tensor:
    """(N, C, *spatial) without gaps, in either layout."""
    return layout.dense(x)


def channels_last(x: Tensor, call: Any) -> Tensor:
    """(N, C, *spatial) that lies as (N, *spatial, C) without gaps."""
    return x if x.movedim(1, -1).is_contiguous() else layout.laid_out(x, channels_last=True)


def even_rows(x: Tensor, call: Any) -> Tensor:
    """(..., D) in rows that are equally far apart."""
    return x.contiguous() if layout.row_stride(x) is None else x


class Operand:
    """A tensor.

    Args:
        shapes: all that it may have, in letters of the shape of the op's first operand. ``*spatial``
            and ``...`` stand for any number of axes. Without one, the op's own check has to look.
        whole: how kernels want it to lie in memory: one of the functions above. None: never copied.
        has_gradient: autograd may ask for its gradient.
        same_dtype: it must have the dtype of the first operand.
        label: what errors call it, if not by its field.
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
    """An argument that is no tensor; ``check(public name, value)`` raises where it is wrong."""

    check: Callable[[str, Any], None]


# The last fields of a backward's declaration: ``dweight: Wanted`` says whether the gradient of ``weight``
# is wanted. ``WantedDtype`` is the gradient's dtype, or None.
_WANTED = "wanted"
Wanted = Annotated[bool, _WANTED]
WantedDtype = Annotated[torch.dtype | None, _WANTED]


class Field(NamedTuple):
    """One argument: ``Field("weight", 1, "Tensor?", Operand("(C,)"))``."""

    name: str
    place: int
    kind: str
    note: Any

    @property
    def is_tensor(self) -> bool:
        return "Tensor" in self.kind


@functools.cache
def fields_of(call_type: Any) -> tuple[Field, ...]:
    """All fields of a declaration, those with defaults too."""
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


# --- what is made of it -----------------------------------------------------------------------------


def arguments_of(call_type: Any) -> tuple[Field, ...]:
    """The fields that the dispatcher knows: all without a default."""
    return tuple(field for field in fields_of(call_type) if field.name not in call_type._field_defaults)


def schema_of(name: str, call_type: Any, results: str) -> str:
    """``scale(Tensor x, Tensor? weight, str activation, float eps) -> Tensor``"""
    arguments = ", ".join(f"{field.kind} {field.name}" for field in arguments_of(call_type))
    return f"{name}({arguments}) -> {results}"


def differentiable(call_type: Any) -> tuple[str, ...]:
    """Names of the operands that may have a gradient: ``("x", "weight")``."""
    return tuple(f.name for f in arguments_of(call_type) if f.is_tensor and f.note.has_gradient)


def passed_on(call_type: Any) -> tuple[str, ...]:
    """Names of the values that a backward takes too, all but dtypes: ``("activation", "eps")``."""
    return tuple(f.name for f in arguments_of(call_type) if not f.is_tensor and f.kind != "ScalarType?")


def gradients_of(grad_type: Any) -> tuple[str, ...]:
    """Of a backward's declaration: whose gradients it makes, ``("x", "weight")``."""
    return tuple(field.name[1:] for field in fields_of(grad_type) if field.note is _WANTED)


def backward_of(call_type: Any, saved: tuple[str, ...], dy: Operand, wanted: Any = Wanted) -> Any:
    """The declaration of an op's backward, for an op with one result that has a gradient.

    ``backward_of(ScaleCall, ("mean",), ...)`` has the fields dy, x, mean, weight, activation, eps, dx
    and dweight: the gradient of the result, the first operand, what the forward saved, the other
    operands that may have a gradient, the values, and which gradients are wanted.
    """
    hints = typing.get_type_hints(call_type, include_extras=True)
    first, *others = differentiable(call_type)
    fields = [("dy", Annotated[Tensor, dy]), (first, hints[first])]
    fields += [(name, Tensor) for name in saved]
    fields += [(name, hints[name]) for name in (*others, *passed_on(call_type))]
    fields += [(f"d{name}", wanted) for name in (first, *others)]
    return NamedTuple(call_type.__name__.replace("Call", "GradCall"), fields)


def checks_of(call_type: Any, own: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """``(public name, call)``, which raises where an argument is wrong.

    For ``ScaleCall``: x is a tensor of rank 2 or more, then ``own`` finds no fault, then weight is a
    floating tensor of shape (C,) on the device of x, and ``check_activation`` finds none.
    """
    first, *others = fields_of(call_type)
    (shape,) = first.note.shapes
    least = sum(part[0] not in "*." for part in _parts(shape))
    # Looked up here, once: torch.compile traces ``check``.
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
    """Where the sizes of ``shape`` stand in that of x, ``first``: slices of it, or numbers.

    ``"(1, C, *spatial)"`` for ``"(N, C, *spatial)"`` -> ``[1, (1, 2), (2, None)]``
    """
    names = _parts(first)
    rest = next((i for i, name in enumerate(names) if name[0] in "*."), len(names))
    found: list[tuple[int, int | None] | int] = []
    for part in _parts(shape):
        if part.isdigit():
            found.append(int(part))
            continue
        place = names.index(part)
        # Behind the axes of any number, places count from the end.
        start = place if place <= rest else place - len(names)
        stop = (place if place < rest else place - len(names)) + 1
        found.append((start, stop or None))
    return found


def _sizes(axes: list[tuple[int, int | None] | int], x: Tensor) -> tuple[int, ...]:
    """``[1, (1, 2)]`` for an x of shape (2, 320, 64, 64) -> ``(1, 320)``"""
    found: tuple[int, ...] = ()
    for axis in axes:
        found += (axis,) if isinstance(axis, int) else tuple(x.shape[axis[0] : axis[1]])
    return found


def gaps_of(call: Any) -> tuple[tuple[int, Callable[[Tensor, Any], Tensor]], ...]:
    """What has to be copied before kernels can read ``call``: ``((0, dense),)`` for an x with gaps."""
    call_type: Any = type(call)
    return tuple(
        (field.place, field.note.whole)
        for field in fields_of(call_type)
        if field.is_tensor and field.note.whole is not None
        for t in (call[field.place],)
        if t is not None and field.note.whole(t, call) is not t
    )


def without_gaps(call: Any, gaps: tuple[tuple[int, Callable[[Tensor, Any], Tensor]], ...]) -> Any:
    """``call`` with copies of the operands in ``gaps``."""
    arguments = list(call)
    for place, whole in gaps:
        arguments[place] = whole(arguments[place], call)
    return type(call)(*arguments)


def empty_gradients(call: Any, names: tuple[str, ...]) -> Gradients:
    """Memory for the gradients ``names`` of a call without gaps: x's as x lies, the others contiguous."""
    found: Gradients = {}
    for name in names:
        t = getattr(call, name)
        if name == "x":
            found[name] = torch.empty_like(t)
        elif t is not None:
            found[name] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    return found


def empty_row_gradients(call: Any, names: tuple[str, ...]) -> Gradients:
    """The same for x (..., D) and operands (D,), whose gradients are ``WantedDtype``: all contiguous."""
    x = call.x
    found: Gradients = {}
    for name in names:
        shape = x.shape if name == "x" else x.shape[-1:]
        found[name] = torch.empty(shape, dtype=getattr(call, f"d{name}"), device=x.device)
    return found
