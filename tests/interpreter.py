"""Triton's interpreter, several times as quick, and with the rounding of a GPU for E4M3."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types

import numpy
import torch
import triton
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

__all__ = ["make_quick"]


def make_quick() -> None:
    """Leaves out what takes most of the interpreter's time and changes no result.

    At each launch, and at each call from one ``@triton.jit`` function to another, it replaces the
    functions of ``triton.language``; here that happens once, and for good. And it looks for overflow
    in each addition and multiplication of integers, of which it tells no one unless it debugs.
    In each operation it also works out the same facts about types again; here it remembers them.

    These are private names of Triton 3.9: another version stays as it is, and takes longer.
    """
    if not triton.__version__.startswith("3.9."):
        return
    _call_builtins_quickly()
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: nothing_to_restore
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _remember_block_types()
    _remember_types_of_pointers()
    _remember_tensors()
    _remember_promotions()
    _remember_numpys_dtypes()
    _remember_sizes_of_dtypes()
    _make_handles_quickly()
    _compare_quickly()
    _remember_broadcasts()
    _remember_operands()
    _remember_operators()
    _remember_cache_policies()
    _convert_quickly()
    _insert_axes_quickly()
    _remember_signatures()
    _convert_bf16_quickly()
    _round_to_e4m3()


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
        try:
            shape, numel, dtype = type.of_tensors
        except AttributeError:
            make(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype
            return
        # Python keeps attributes without a dict as long as they are set one by one.
        self.handle, self.shape, self.numel, self.type, self.dtype = handle, shape, numel, type, dtype

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


def _remember_types_of_pointers() -> None:
    """Makes one object of the type of each argument, as of each block type."""
    tl.str_to_ty = functools.cache(tl.str_to_ty)


def _remember_cache_policies() -> None:
    """Makes one object of the cache policy of each load and store."""
    tl.core._normalize_cache_policy = functools.cache(tl.core._normalize_cache_policy)


def _remember_operators() -> None:
    """Remembers what an operator does with two operands: one function of NumPy, on their data.

    Both the function and the conversions of the operands depend on the operands' types alone. Scalars are
    arrays of one number, so NumPy's broadcasts are Triton's.
    """
    both_ways = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")
    names = [*both_ways, *(f"r{name}" for name in both_ways), "lt", "le", "gt", "ge", "eq", "ne"]
    for method in (f"__{name}__" for name in names):
        setattr(tl.tensor, method, _quick_operator(method, getattr(tl.tensor, method)))


def _quick_operator(method: str, slow):
    operators, new_handle = f"operators {method}", object.__new__

    def operator(self, other):
        kind = type(other)
        if kind is tl.tensor:
            other_type = other.type
            key = id(other_type)
        elif kind is int or (kind is float and other):  # the key of 0.0 would also be that of -0.0
            other_type, key = None, (kind, other)
        else:
            return slow(self, other)
        try:
            function, result_type, dtype, _ = vars(self.type)[operators][key]
        except KeyError:
            result, function = _watch(slow, self, other)
            known = vars(self.type).setdefault(operators, {})
            known[key] = function, result.type, result.type.scalar, other_type  # alive, so its id is its own
            return result
        if function is None:
            return slow(self, other)
        data = function(self.handle.data, None if other_type is None else other.handle.data)
        handle = new_handle(interpreter.TensorHandle)  # the size of its data was checked with the first one
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        return tl.tensor(handle, result_type)

    return operator


def _watch(slow, self: tl.tensor, other: tl.tensor | float):
    """(the operator's result, its function of the data of both operands, or None if it does more)"""
    builder, semantic_of_all = interpreter.interpreter_builder, interpreter.interpreter_semantic
    checks, calls = [], []

    def check(lhs, rhs, *flags, **options):
        checked = type(semantic_of_all).binary_op_type_checking_impl(
            semantic_of_all, lhs, rhs, *flags, **options
        )
        checks.append(((lhs, rhs), checked))
        return checked

    def binary_op(lhs, rhs, op):
        calls.append((lhs, rhs, op))
        return type(builder).binary_op(builder, lhs, rhs, op)

    def create_addptr(ptr, offset):
        width = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        calls.append((ptr, offset, lambda start, steps: start + width * steps.astype(numpy.uint64)))
        return type(builder).create_addptr(builder, ptr, offset)

    def create_idiv(lhs, rhs):
        calls.append((lhs, rhs, lambda a, b: (a - numpy.fmod(a, b)) // b))
        return type(builder).create_idiv(builder, lhs, rhs)

    watched = {"binary_op": binary_op, "create_addptr": create_addptr, "create_idiv": create_idiv}
    semantic_of_all.binary_op_type_checking_impl = check
    vars(builder).update(watched)
    try:
        result = slow(self, other)
    finally:
        del semantic_of_all.binary_op_type_checking_impl
        for name in watched:
            del vars(builder)[name]
    if len(checks) != 1 or len(calls) != 1:
        return result, None
    (operands, checked), (*handles, function) = checks[0], calls[0]
    return result, _function_of_data(self, other, operands, checked, handles, function)


# NumPy converts these as the interpreter does.
_PLAIN = {tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64}
_PLAIN |= {tl.float16, tl.float32, tl.float64}


def _function_of_data(self, other, operands, checked, handles, function):
    on_bits = function in (numpy.bitwise_and, numpy.bitwise_or, numpy.bitwise_xor)
    if handles[0].data.dtype == bool and not on_bits:
        return None  # the interpreter computes in int8
    if {id(operand) for operand in operands} != {id(self), id(other)}:
        return None
    values = []
    for operand, tensor, handle in zip(operands, checked, handles, strict=True):
        if handle is not tensor.handle:
            return None
        if not isinstance(operand, tl.tensor):
            values.append(handle.data)
        elif operand.dtype == tensor.dtype:
            values.append(None)
        elif {operand.dtype, tensor.dtype} <= _PLAIN:
            values.append(handle.data.dtype)
        else:
            return None
    left, right = values
    if isinstance(left, numpy.ndarray):
        return lambda data, _: function(left, data)
    if isinstance(right, numpy.ndarray):
        return lambda data, _: function(data, right)
    if operands[0] is not self:
        return None
    if left is not None:
        return lambda a, b: function(a.astype(left), b)
    if right is not None:
        return lambda a, b: function(a, b.astype(right))
    return function


def _convert_quickly() -> None:
    """Converts a tensor in one step, or in none, where NumPy converts as the interpreter does."""
    convert = tl.tensor.to

    def to(self, dtype, *rounding, **options):
        if rounding or options or type(dtype) is not tl.dtype or dtype not in _PLAIN:
            return convert(self, dtype, *rounding, **options)
        if self.dtype is dtype:
            return self
        if self.dtype not in _PLAIN:
            return convert(self, dtype)
        data = self.handle.data.astype(interpreter._get_np_dtype(dtype))
        new_type = self.type.with_element_ty(dtype) if self.type.is_block() else dtype
        return tl.tensor(interpreter.TensorHandle(data, dtype), new_type)

    tl.tensor.to = to


def _insert_axes_quickly() -> None:
    """Remembers the shape of ``x[None, :]`` and the like."""
    get, whole = tl.tensor.__getitem__, slice(None)

    def getitem(self, slices):
        if type(slices) is not tuple or any(item is not None and item != whole for item in slices):
            return get(self, slices)
        known = vars(self.type).setdefault("with_axes", {})
        key = tuple(item is None for item in slices)
        found = known.get(key)
        if found is None:
            result = get(self, slices)
            known[key] = result.type, result.handle.data.shape
            return result
        new_type, shape = found
        handle = interpreter.TensorHandle(self.handle.data.reshape(shape), self.handle.dtype)
        return tl.tensor(handle, new_type)

    tl.tensor.__getitem__ = getitem


def _remember_signatures() -> None:
    """Reads the signature of a kernel once, and not at each launch."""
    signature = functools.cache(inspect.signature)

    def getcallargs(function, *args, **kwargs):
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    interpreter.inspect = types.SimpleNamespace(
        **{
            **vars(inspect),
            "getfullargspec": functools.cache(inspect.getfullargspec),
            "get_annotations": functools.cache(inspect.get_annotations),
            "getcallargs": getcallargs,
        }
    )


def _convert_bf16_quickly() -> None:
    """Converts between bf16 and fp32 by a shift, with the interpreter's results for all normal numbers.

    The interpreter gets subnormal numbers wrong.
    """
    convert = interpreter._convert_float

    def convert_float(data, input_dtype, output_dtype, rounding_mode):
        if rounding_mode is None and (input_dtype, output_dtype) == (tl.bfloat16, tl.float32):
            return data.view(numpy.uint16).astype(numpy.uint32) << 16
        if rounding_mode is None and (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
            return (data.view(numpy.uint32) >> 16).astype(numpy.uint16)
        return convert(data, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert_float


def _round_to_e4m3() -> None:
    """Rounds to E4M3 as a GPU does. The interpreter loses the carry of a mantissa that is rounded up."""
    convert = interpreter._convert_float

    def convert_float(data, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) != (tl.float32, tl.float8e4nv):
            return convert(data, input_dtype, output_dtype, rounding_mode)
        rounded = torch.from_numpy(numpy.ascontiguousarray(data)).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    interpreter._convert_float = convert_float
