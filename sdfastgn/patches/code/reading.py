"""Reads from a function's bytecode which globals, attributes and entries of dicts it names.

``F.interpolate(x, **_OPTIONS["up"])`` names the global ``F`` and its attribute ``interpolate``, the global
``_OPTIONS`` and its entry ``"up"``. Nothing is run.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any, NamedTuple

# Bytecode instructions that put the value of a name on the stack. LOAD_DEREF does so for closure variables.
_NAMES = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"))
# Bytecode instructions that replace the last value on the stack by an attribute of this value. Python 3.12
# has no LOAD_METHOD.
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
# Bytecode instructions that set a global or a variable of a closure.
_STORES = frozenset(("STORE_GLOBAL", "STORE_DEREF"))
# Bytecode instructions that may stand between two parts of ``a.b["c"]`` without changing the value.
_NEUTRAL = frozenset(("PUSH_NULL", "CACHE", "EXTENDED_ARG", "NOP", "PRECALL"))


class Item(NamedTuple):
    """A part of a chain (``Names.chains``) that reads the entry ``key`` of a dict, as ``["up"]`` does."""

    key: Any


class Names(NamedTuple):
    """The names that a code object reads and sets.

    Attributes:
        chains: tuples. Each begins with the name of a global or of a variable of a closure. The attributes
            (as text) and entries (``Item``) that are read from it follow, as in ``("F", "interpolate")``.
        attributes: the names of all attributes that it reads, of any object.
        stored: the globals and the variables of closures that it sets, such as counters.
    """

    chains: frozenset[tuple[Any, ...]]
    attributes: frozenset[str]
    stored: frozenset[str]


@functools.cache
def names_in(code: types.CodeType) -> Names:
    """The names that ``code``, and the functions that are defined in it, read and set."""
    chains: set[tuple[Any, ...]] = set()
    attributes: set[str] = set()
    stored: set[str] = set()
    chain: tuple[Any, ...] = ()
    # ``key`` is (constant,) if the bytecode has just loaded a constant after the value of ``chain``, else ().
    # The constant is the key of a dict if BINARY_SUBSCR follows.
    key: tuple[Any, ...] = ()
    for instruction in dis.get_instructions(code):
        op, value = instruction.opname, instruction.argval
        if op in _NAMES:
            chain, key = (value,), ()
            chains.add(chain)
        elif op in _ATTRIBUTES:
            attributes.add(value)
            chain, key = (*chain, value) if chain else (), ()
            if chain:
                chains.add(chain)
        elif op == "LOAD_CONST" and chain and isinstance(value, (str, int)):
            key = (value,)
            if chain[-1] == "get":
                chains.add((*chain[:-1], Item(value)))
        elif op == "BINARY_SUBSCR" and key:
            chain, key = (*chain, Item(*key)), ()
            chains.add(chain)
        elif op not in _NEUTRAL:
            if op == "LOAD_SUPER_ATTR":
                attributes.add(value)
            elif op in _STORES:
                stored.add(value)
            chain, key = (), ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            chains |= inner.chains
            attributes |= inner.attributes
            stored |= inner.stored
    return Names(frozenset(chains), frozenset(attributes), frozenset(stored))
