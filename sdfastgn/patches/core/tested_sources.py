"""Which upstream methods a fusion replaces, and whether they are the versions that it was tested with.

A fused ``forward`` repeats what the stock one does. When upstream changes that, repeating the old
one would change pixels; so the code of each replaced (or relied upon) method is compared with the
versions tested, and unknown code means: skip, with a reason. Each fusion's file says which
these are.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import types
import weakref
from typing import Any, NamedTuple

__all__ = ["TestedSource", "source_hash", "tested", "unknown_source"]


class TestedSource(NamedTuple):
    """An upstream class, and per method the ``source_hash`` of each version of it that was tested."""

    cls: type
    hashes: dict[str, tuple[str, ...]]


def tested(cls: type, **hashes: str) -> TestedSource:
    """``tested(GEGLU, forward="2749119a143f533a")``. Spaces separate the hashes of several versions."""
    return TestedSource(cls, {method: tuple(found.split()) for method, found in hashes.items()})


# By the function itself: a class may get another one between two calls of ``optimize``.
_hashes: weakref.WeakKeyDictionary[types.FunctionType, str | None] = weakref.WeakKeyDictionary()


def source_hash(cls: type, method: str) -> str | None:
    """First 16 hexadecimal digits of the SHA-256 of the ``outline`` of a method or property.

    None if that is not upstream's or cannot be read.

    Below upstream's own decorators, which are part of the outline. Any other wrapper, as
    ``functools.wraps`` makes them look like what they wrap, is None.
    """
    function = getattr(cls, method, None)
    if isinstance(function, property):
        function = function.fget
    if not isinstance(function, types.FunctionType):
        return None
    if function not in _hashes:
        _hashes[function] = _hash_of(function)
    return _hashes[function]


def _hash_of(function: types.FunctionType) -> str | None:
    wrappers: list[Any] = []
    try:
        inner = inspect.unwrap(function, stop=wrappers.append)
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(inner))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    if not isinstance(definition, ast.FunctionDef) or len(wrappers) > len(definition.decorator_list):
        return None
    if not all(map(_is_upstreams, (*wrappers, inner))):
        return None
    return hashlib.sha256(outline(definition).encode()).hexdigest()[:16]


def outline(part: Any) -> str:
    """Syntax as text, without what computes nothing: comments, docstrings, annotations, layout.

    The same in every version of Python, as ``ast.dump`` and ``ast.unparse`` are not.
    """
    if isinstance(part, list):
        return f"[{','.join(outline(each) for each in part if not _is_docstring(each))}]"
    if not isinstance(part, ast.AST):
        return ascii(part)
    fields = {name: value for name, value in ast.iter_fields(part) if name not in _NOT_COMPUTED}
    # Newer versions of Python have more fields, which are empty without their syntax.
    shown = (f"{name}={outline(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(part).__name__}({','.join(shown)})"


# Fields of ``ast``'s classes: annotations of arguments and variables, and of what is returned.
_NOT_COMPUTED = ("annotation", "returns")


def _is_docstring(part: Any) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def _is_upstreams(link: Any) -> bool:
    # Not its __module__, which functools.wraps copies.
    module = getattr(link, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] in ("diffusers", "torch")


def unknown_source(*sources: TestedSource) -> str | None:
    """The reason to leave a module alone if a method of ``sources`` was not tested, else None."""
    for cls, hashes in sources:
        for method, known in hashes.items():
            if source_hash(cls, method) not in known:
                name = f"{cls.__name__}.{method}"
                return f"{name} of this diffusers is not a version that sdfastgn was tested with"
    return None
