"""Triton's interpreter, several times as quick."""

from __future__ import annotations

import dataclasses
import types

import numpy
import triton
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

from sdfastgn.versions import never_run

__all__ = ["make_quick"]


def make_quick() -> None:
    """Leaves out what takes most of the interpreter's time and changes no result.

    At each launch, and at each call from one ``@triton.jit`` function to another, it replaces the
    functions of ``triton.language``; here that happens once, and for good. And it looks for overflow
    in each addition and multiplication of integers, of which it tells no one unless it debugs.
    In each operation it also works out the same facts about types again; here it remembers them.

    These are Triton's private names: a version that was never run stays as it is, and takes longer.
    """
    if never_run("triton", triton.__version__):
        return
    _call_builtins_quickly()
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: nothing_to_restore
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _remember_block_types()
    _remember_tensors()
    _remember_promotions()
    _remember_numpys_dtypes()
    _remember_sizes_of_dtypes()
    _make_handles_quickly()
    _compare_quickly()
    _remember_broadcasts()
    _remember_operands()


def _call_builtins_quickly() -> None:
    """Calls the functions of ``triton.language`` without Triton's check for a call outside of a kernel."""
    checked = tl.core.builtin(lambda: None).__code__
    replace, semantic_of_all = interpreter._patch_attr, interpreter.interpreter_semantic

    def patch_attr(obj, name, member, builder, scope):
        if getattr(member, "__code__", None) is not checked:
            replace(obj, name, member, builder, scope)
            return
        function = member.__wrapped__

        def called(*args, **kwargs):
            kwargs["_semantic"] = semantic_of_all
            return function(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch_attr


def _remember_block_types() -> None:
    """Makes one object of each block type, so that other facts can be kept with it."""
    make, known = tl.block_type.__init__, {}

    def new(cls, element_ty, shape):
        # A size is an int or a constexpr.
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        found = known.get(key)
        if found is None:
            found = object.__new__(cls)
            make(found, element_ty, shape)
            known[key] = found
        return found

    tl.block_type.__new__ = new
    tl.block_type.__init__ = lambda self, element_ty, shape: None


def _remember_tensors() -> None:
    """Tensors of one type differ by their handle alone."""
    make = tl.tensor.__init__

    def init(self, handle, type):
        attributes = vars(type).get("of_tensors")
        if attributes is None:
            make(self, handle, type)
            type.of_tensors = {key: value for key, value in vars(self).items() if key != "handle"}
        else:
            self.__dict__.update(attributes, handle=handle)

    tl.tensor.__init__ = init


def _remember_promotions() -> None:
    promote, known = semantic.TritonSemantic.computation_type_impl, {}

    def computation_type_impl(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        found = known.get(key)
        if found is None:
            found = known[key] = promote(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return found

    semantic.TritonSemantic.computation_type_impl = computation_type_impl


def _remember_numpys_dtypes() -> None:
    find, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


def _remember_sizes_of_dtypes() -> None:
    validate, known = interpreter._validate_np_data_size, {}

    def validate_np_data_size(array, dtype):
        key = (array.itemsize, dtype.name)
        if key not in known:
            known[key] = validate(array, dtype)
        return known[key]

    interpreter._validate_np_data_size = validate_np_data_size


def _make_handles_quickly() -> None:
    """Replaces the constructor that ``dataclass`` made, without a change of what it checks."""
    check = interpreter.TensorHandle.__post_init__

    def init(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not interpreter._validate_np_data_size(data, dtype):
            check(self)

    interpreter.TensorHandle.__init__ = init


def _compare_quickly() -> None:
    """Compares identity first: most types and shapes that are compared are one object."""
    equal, equal_shapes = tl.dtype.__eq__, tl.tuple.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    tl.tuple.__eq__ = lambda self, other: self is other or equal_shapes(self, other)


def _remember_broadcasts() -> None:
    """Remembers which shape two operands get. It depends on their types alone."""
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self, lhs, rhs):
        if lhs.type is rhs.type:
            return lhs, rhs
        known = vars(lhs.type).setdefault("broadcasts", {})
        found = known.get(id(rhs.type))
        if found is None:
            found = tuple((operand.type, _sizes(operand.type)) for operand in broadcast(self, lhs, rhs))
            known[id(rhs.type)] = (*found, rhs.type)  # kept alive, so that its id stays its own
        return _expanded(lhs, *found[0]), _expanded(rhs, *found[1])

    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value


def _sizes(type: tl.dtype) -> list[int]:
    return [getattr(size, "value", size) for size in type.shape] if type.is_block() else []


def _expanded(operand: tl.tensor, type: tl.dtype, sizes: list[int]) -> tl.tensor:
    if operand.type is type:
        return operand
    data = numpy.empty(sizes, operand.handle.data.dtype)
    data[...] = operand.handle.data
    return tl.tensor(interpreter.TensorHandle(data, operand.handle.dtype.scalar), type)


def _remember_operands() -> None:
    """Remembers which types of two operands need no conversion, and numbers that were made into tensors.

    Whether operands are converted depends on their types alone.
    """
    check = semantic.TritonSemantic.binary_op_type_checking_impl

    def binary_op_type_checking_impl(self, lhs, rhs, *flags, **options):
        if type(lhs) is not tl.tensor:
            return check(self, lhs, rhs, *flags, **options)
        if type(rhs) is tl.tensor:
            kind = id(rhs.type)
        elif type(rhs) is int or (type(rhs) is float and rhs):  # the key of 0.0 would also be that of -0.0
            kind = (type(rhs), rhs)
        else:
            return check(self, lhs, rhs, *flags, **options)
        known = vars(lhs.type).setdefault("operands", {})
        key = (kind, flags, *options.items())
        found = known.get(key)
        if found is None:
            left, right = check(self, lhs, rhs, *flags, **options)
            if left is lhs and type(rhs) is not tl.tensor:
                known[key] = right
            elif left is lhs and right is rhs:
                known[key] = rhs.type  # kept alive, so that its id stays its own
            return left, right
        return lhs, rhs if type(rhs) is tl.tensor else found

    semantic.TritonSemantic.binary_op_type_checking_impl = binary_op_type_checking_impl
