"""Derives an op's schema, checks and gradients from its declaration.

A declaration is a NamedTuple class with one annotated field for each argument of the op:

    class ScaleCall(NamedTuple):
        x: Annotated[Tensor, Operand("(N, C, *spatial)", whole=dense)]
        weight: Annotated[Tensor | None, Operand("(C,)")]
        activation: Annotated[str, Value(check_activation)]
        eps: float

Most functions here derive one thing from such a class, for example the op's schema. ``common/op.py`` and
``common/grad_op.py`` use these functions to register ops. The other functions here copy tensors into memory
layouts that kernels can read (``Operand(whole=...)``), or prepare the tensors of a call.

An instance of such a class is a *call*: the values of the op's arguments. An *operand* is an argument that is
a tensor.

Fields with defaults come last. They are not arguments in the op's schema. Only the code that launches the
op's kernels uses them.
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

# Maps the annotation of a field of a declaration to the type of the op's argument in the op's schema.
_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    torch.dtype | None: "ScalarType?",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
}

# Maps the type of an argument in the op's schema to (Python's type, check). The check is called for a value
# of another type, such as NumPy's int. It raises an error if PyTorch does not accept the value.
NUMBERS: dict[str, tuple[type, Callable[[str, str, Any], object]]] = {
    "int": (int, as_index),
    "float": (float, as_float),
    "bool": (bool, check_bool),
}

# Maps the name of an argument that is a tensor to the gradient of this tensor. If the gradient is not wanted,
# the value is None, or the name is missing.
Gradients = dict[str, Tensor | None]


# --- annotations ------------------------------------------------------------------------------------

# The next functions are values for ``Operand(whole=...)``. Each function stands for one memory layout that
# kernels can read. It returns the tensor itself if the tensor has this layout, else a copy that has it. The
# parameter ``call`` has the values of all arguments of the op. Files of single ops define further functions
# for layouts that only one op needs.


def contiguous(t: Tensor, call: Any) -> Tensor:
    """Returns ``t``, or a contiguous copy if ``t`` is not contiguous. ``t`` may have any shape."""
    return t.contiguous()


def dense(x: Tensor, call: Any) -> Tensor:
    """Returns ``x`` (N, C, *spatial) if it is channels-last or channels-first, else a copy that is."""
    return layout.dense(x)


def channels_last(x: Tensor, call: Any) -> Tensor:
    """Returns ``x`` (N, C, *spatial), or a channels-last copy if its memory order is not (N, *spatial, C)."""
    return x if x.movedim(1, -1).is_contiguous() else layout.laid_out(x, channels_last=True)


def dense_rows(x: Tensor, call: Any) -> Tensor:
    """Returns ``x`` (..., D), or a contiguous copy if the elements of a row are not neighbors in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def even_rows(x: Tensor, call: Any) -> Tensor:
    """Returns ``x`` (..., D), or a contiguous copy if no constant stride leads from row to row.

    ``layout.row_stride`` has the exact conditions.
    """
    return x.contiguous() if layout.row_stride(x) is None else x


class Operand:
    """Annotation of an argument that is a tensor.

    Args:
        shapes: the allowed shapes. A letter such as C means the same size in all operands of the op.
            ``*spatial`` and ``...`` match zero or more axes. If no shape is given, the op's own check must
            check the shape.
        whole: function ``(tensor, call) -> tensor`` that returns the tensor in a layout that kernels can
            read, such as ``contiguous`` or ``dense`` of this file. None if kernels can read every layout.
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

    ``check``: function ``(name of the public function, value)`` that raises an error if the value is wrong.
    """

    check: Callable[[str, Any], None]


# Annotations of the last fields in the declaration of an op that computes gradients. The value of a field
# ``dweight: Wanted`` is True if the gradient of ``weight`` is wanted. The value of a field
# ``dweight: WantedDtype`` is the dtype of the gradient, or None if the gradient is not wanted.
_WANTED = "wanted"
Wanted = Annotated[bool, _WANTED]
WantedDtype = Annotated[torch.dtype | None, _WANTED]


class Field(NamedTuple):
    """One argument of an op: a field of the NamedTuple class that declares the op's arguments.

    For example ``Field("weight", 1, "Tensor?", Operand("(C,)"))``.
    ``place``: index of the field. ``kind``: the field's type in the op's schema. ``note``: the field's
    annotation, such as an ``Operand``, or None if it has no annotation.
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
    """All fields of the NamedTuple class that declares an op's arguments, including those with defaults."""
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
    """The fields of ``call_type`` that have no default: the arguments in the op's schema.

    ``call_type``: the NamedTuple class that declares the op's arguments.
    """
    return tuple(field for field in fields_of(call_type) if field.name not in call_type._field_defaults)


def schema_of(name: str, call_type: Any, results: str) -> str:
    """The op's schema, such as ``scale(Tensor x, Tensor? weight, str activation, float eps) -> Tensor``."""
    arguments = ", ".join(f"{field.kind} {field.name}" for field in arguments_of(call_type))
    return f"{name}({arguments}) -> {results}"


def differentiable(call_type: Any) -> tuple[str, ...]:
    """Names of the operands that may have a gradient, for example ``("x", "weight")``."""
    return tuple(f.name for f in arguments_of(call_type) if f.is_tensor and f.note.has_gradient)


def passed_on(call_type: Any) -> tuple[str, ...]:
    """Names of the arguments that are neither tensors nor dtypes, for example ``("activation", "eps")``.

    The op's backward takes these arguments too.
    """
    return tuple(f.name for f in arguments_of(call_type) if not f.is_tensor and f.kind != "ScalarType?")


def gradients_of(grad_type: Any) -> tuple[str, ...]:
    """Names of the operands whose gradients a backward can compute, for example ``("x", "weight")``.

    ``grad_type``: the NamedTuple class that declares the arguments of the backward.
    """
    return tuple(field.name[1:] for field in fields_of(grad_type) if field.note is _WANTED)


def backward_of(call_type: Any, saved: tuple[str, ...], dy: Operand, wanted: Any = Wanted) -> Any:
    """Returns a NamedTuple class with the arguments of an op's backward: the declaration of the backward.

    The op must have one result with a gradient.

    For example, an op has the arguments x, weight, activation and eps, and its forward saves the tensor mean.
    Then the fields are dy, x, mean, weight, activation, eps, dx, dweight. The order of the fields is:

    - the gradient of the result;
    - the op's first operand;
    - the tensors that the forward saved;
    - the other operands that may have a gradient;
    - the op's arguments that are neither tensors nor dtypes;
    - for each operand that may have a gradient, whether this gradient is wanted.

    Args:
        call_type: the declaration of the op.
        saved: names of the saved tensors.
        dy: the annotation of the result's gradient.
        wanted: the annotation of the last fields. With ``Wanted`` their values are bools, with
            ``WantedDtype`` they are dtypes or None.
    """
    hints = typing.get_type_hints(call_type, include_extras=True)
    first, *others = differentiable(call_type)
    fields = [("dy", Annotated[Tensor, dy]), (first, hints[first])]
    fields += [(name, Tensor) for name in saved]
    fields += [(name, hints[name]) for name in (*others, *passed_on(call_type))]
    fields += [(f"d{name}", wanted) for name in (first, *others)]
    return NamedTuple(call_type.__name__.replace("Call", "GradCall"), fields)


def checks_of(call_type: Any, own: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """Returns a function ``check(name, call)`` that raises an error if an argument is wrong.

    ``name`` is the name of the public function, with which each error begins. The function checks, in this
    order:

    - the first operand is a floating tensor, and has at least the axes that its annotation names;
    - ``own(name, call)``, the op's own check, does not raise;
    - the check in each annotation ``Value`` does not raise;
    - numbers and bools have types that PyTorch accepts;
    - each other operand is a floating tensor of one of its allowed shapes, on the device of the first
      operand. Or it is None, if the declaration allows None.

    It raises TypeError for a wrong type or dtype, ValueError for a wrong value, shape or device, and what
    ``own`` raises.
    """
    first, *others = fields_of(call_type)
    (shape,) = first.note.shapes
    least = sum(part[0] not in "*." for part in _parts(shape))
    # torch.compile traces the function ``check``. So what does not depend on the call is computed here,
    # before ``check`` is called.
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
    """Splits a shape: ``"(N, C, *spatial)"`` becomes ``["N", "C", "*spatial"]``."""
    return [part.strip() for part in shape.strip("()").split(",") if part.strip()]


def _axes(shape: str, first: str) -> list[tuple[int, int | None] | int]:
    """Translates each part of ``shape``, the allowed shape of an operand. A number becomes an int.

    A name becomes (start, stop), the range of the axes with this name in ``first``, the shape of the op's
    first operand. For example, ``shape`` ``"(1, C, *spatial)"`` and ``first`` ``"(N, C, *spatial)"`` give
    ``[1, (1, 2), (2, None)]``.
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
    """Returns the shape that an operand must have in a call whose first operand is ``x``.

    ``axes``: for each axis of the operand its size, or the range of the axes of ``x`` with the same sizes.
    For example, ``[1, (1, 2)]`` and ``x`` of shape (2, 320, 64) give ``(1, 320)``.
    """
    found: tuple[int, ...] = ()
    for axis in axes:
        found += (axis,) if isinstance(axis, int) else tuple(x.shape[axis[0] : axis[1]])
    return found


def gaps_of(call: Any) -> tuple[tuple[int, Callable[[Tensor, Any], Tensor]], ...]:
    """Finds the operands whose memory layout kernels cannot read. Returns (index, function) for each of them.

    The function copies the operand into a layout that kernels can read. It is ``whole`` of the operand's
    annotation. For example, the result is ``((0, dense),)`` if only the first operand has gaps in memory, and
    its annotation has ``whole=dense``.
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

    ``gaps``: (index of the operand, function that copies the operand), from ``gaps_of(call)``.
    """
    arguments = list(call)
    for place, whole in gaps:
        arguments[place] = whole(arguments[place], call)
    return type(call)(*arguments)


def empty_gradients(call: Any, names: tuple[str, ...]) -> Gradients:
    """Allocates uninitialized tensors for the gradients of the operands ``names``.

    A gradient has the shape and the dtype of its operand. The gradient of the operand x also has the strides
    of x. So x must have no gaps in memory. All other gradients are contiguous. An operand that is None gets
    no gradient.
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
    """Allocates uninitialized, contiguous tensors for the gradients of the operands ``names``.

    This function is for ops on rows.

    The gradient of x (..., D) has the shape of x. All other gradients have the shape (D,). The fields of
    ``call`` that are annotated with ``WantedDtype`` give the dtypes.
    """
    x = call.x
    found: Gradients = {}
    for name in names:
        shape = x.shape if name == "x" else x.shape[-1:]
        found[name] = torch.empty(shape, dtype=getattr(call, f"d{name}"), device=x.device)
    return found
