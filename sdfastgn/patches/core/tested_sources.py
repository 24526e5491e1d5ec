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

__all__ = [
    "TestedSource",
    "computed",
    "definition_of",
    "hash_of",
    "source_hash",
    "tested",
    "unknown_source",
    "upstream_definition",
]


class TestedSource(NamedTuple):
    """An upstream class, and per method the ``source_hash`` of each version of it that was tested.

    ``cls`` may be a module: its functions stand for methods then.
    """

    cls: Any
    hashes: dict[str, tuple[str, ...]]


def tested(cls: Any, **hashes: str) -> TestedSource:
    """``tested(GEGLU, forward="2749119a143f533a")``. Spaces separate the hashes of several versions."""
    return TestedSource(cls, {method: tuple(found.split()) for method, found in hashes.items()})


# Package -> its name in reasons.
_UPSTREAM = {"diffusers": "diffusers", "comfy": "ComfyUI", "torch": "PyTorch"}

# By the function itself: a class may get another one between two calls of ``optimize``.
_hashes: weakref.WeakKeyDictionary[types.FunctionType, str | None] = weakref.WeakKeyDictionary()


def source_hash(cls: Any, method: str) -> str | None:
    """``hash_of`` a method or property. None if that is not upstream's or cannot be read.

    Below upstream's own decorators, which are part of the hash. Any other wrapper, as
    ``functools.wraps`` makes them look like what they wrap, is None.
    """
    function = getattr(cls, method, None)
    if isinstance(function, property):
        function = function.fget
    if not isinstance(function, types.FunctionType):
        return None
    if function not in _hashes:
        definition = upstream_definition(function)
        _hashes[function] = None if definition is None else hash_of(definition)
    return _hashes[function]


def upstream_definition(function: types.FunctionType) -> ast.FunctionDef | None:
    """The definition of upstream's ``function``, below its decorators. None as in ``source_hash``."""
    wrappers: list[Any] = []
    try:
        inner = inspect.unwrap(function, stop=wrappers.append)
    except ValueError:
        return None
    definition = definition_of(inner)
    if definition is None or len(wrappers) > len(definition.decorator_list):
        return None
    return definition if all(map(_is_upstreams, (*wrappers, inner))) else None


def definition_of(function: Any) -> ast.FunctionDef | None:
    """The definition of anyone's ``function``, which wraps no other. None if it cannot be read."""
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return None
    return definition if isinstance(definition, ast.FunctionDef) else None


def hash_of(definition: ast.FunctionDef) -> str:
    """First 16 hexadecimal digits of the SHA-256 of what ``definition`` computes.

    No layout, comment, docstring or annotation is in it. It is the same in every version of Python.
    """
    return hashlib.sha256(_dump(computed(definition)).encode()).hexdigest()[:16]


def computed(definition: ast.FunctionDef) -> ast.FunctionDef:
    """``definition`` itself, after docstrings and the annotations of signatures are removed from it."""
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        for value in vars(node).values():
            if isinstance(value, list):
                value[:] = [each for each in value if not _is_docstring(each)]
    return definition


def _is_docstring(part: Any) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


def _dump(part: Any) -> str:
    """As ``ast.dump``, which shows empty fields in some versions of Python, and fields that others lack."""
    if isinstance(part, list):
        return f"[{','.join(map(_dump, part))}]"
    if not isinstance(part, ast.AST):
        return ascii(part)
    fields = (f"{name}={_dump(value)}" for name, value in ast.iter_fields(part) if value not in (None, []))
    return f"{type(part).__name__}({','.join(fields)})"


def _is_upstreams(link: Any) -> bool:
    # Not its __module__, which functools.wraps copies.
    module = getattr(link, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] in _UPSTREAM


def _package_of(cls: Any) -> str:
    """Of a class, or of a module with functions in the place of methods."""
    return getattr(cls, "__module__", cls.__name__).partition(".")[0]


def unknown_source(*sources: TestedSource) -> str | None:
    """The reason to leave a module alone if a method of ``sources`` was not tested, else None."""
    for cls, hashes in sources:
        for method, known in hashes.items():
            if source_hash(cls, method) not in known:
                package = _UPSTREAM.get(_package_of(cls), "diffusers")
                name = f"{cls.__name__}.{method}"
                return f"{name} of this {package} is not a version that sdfastgn was tested with"
    return None
