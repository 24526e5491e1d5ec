"""Triton's interpreter, several times as quick."""

from __future__ import annotations

import dataclasses
import types

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
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing_to_restore = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: nothing_to_restore
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _remember_block_types()
    _remember_tensors()
    _remember_promotions()
    _remember_numpys_dtypes()
    _compare_quickly()


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


def _compare_quickly() -> None:
    """Most types that are compared are one object, and most tensors to be broadcast have one shape."""
    equal, broadcast = tl.dtype.__eq__, semantic.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a is b or (a.is_block() and b.is_block() and a.shape.values == b.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic.TritonSemantic.broadcast_impl_value = broadcast_impl_value
