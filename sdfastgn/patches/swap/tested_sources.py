"""Checks that the installed code of upstream methods is a version that sdfastgn was tested with.

"Upstream" is diffusers or ComfyUI, and a "stock" class or method is one of theirs. A fused ``forward`` was
tested against certain versions of the stock ``forward``. After a change of the stock ``forward``, the images
could differ. So the installed code of each method is compared with the tested versions, and a module whose
class has unknown code is skipped with a reason. Each fusion's file names the methods that the fusion replaces
or relies on. ``tested_sources.json`` has the hashes of the tested versions.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import re
import textwrap
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

# The file with the hashes of the tested versions of methods of diffusers and ComfyUI. The command
# ``sdfastgn sources`` reads the file too, and adds new versions to it.
FILE = Path(__file__).parents[1] / "tested_sources.json"
# Every checkout of ComfyUI has this file. So a folder without it is no checkout of ComfyUI.
OF_COMFYUI = "comfy/ops.py"


class TestedSource(NamedTuple):
    """A class of diffusers or ComfyUI, and the names of its methods that a fusion replaces or relies on.

    ``cls`` may also be a Python module. Then ``methods`` names functions in it.
    """

    cls: Any
    methods: tuple[str, ...]


def tested(cls: Any, *methods: str) -> TestedSource:
    """Makes a ``TestedSource``, as in ``tested(GEGLU, "__init__", "forward")``.

    A fusion with this source is applied only if the installed code of all ``methods`` of ``cls`` is a version
    that was tested.
    """
    return TestedSource(cls, methods)


def upstream_name(cls: Any) -> str:
    """The key of ``cls`` in ``tested_sources.json``: ``module.Class``, or the module's name for a module."""
    return cls.__name__ if isinstance(cls, types.ModuleType) else f"{cls.__module__}.{cls.__qualname__}"


@functools.cache
def tested_versions() -> dict[str, dict[str, list[dict[str, str]]]]:
    """The content of tested_sources.json: name of a class -> name of a method -> its tested versions.

    The oldest version comes first. A version is a dict with the ``hash`` that ``source_hash`` returns for it
    and, if known, ``first_seen``: the first release in which this code was seen.
    """
    return json.loads(FILE.read_text(encoding="utf-8"))


def newest_release(package: str) -> str:
    """The newest release of ``package`` (such as "diffusers") in which a tested version was first seen."""
    releases = [
        version["first_seen"]
        for name, methods in tested_versions().items()
        for version in (version for versions in methods.values() for version in versions)
        if name.startswith(f"{package}.") and "first_seen" in version
    ]
    return max(releases, key=lambda release: [int(number) for number in re.findall(r"\d+", release)])


def is_known(cls: Any, method: str) -> bool:
    """True if the installed code of the method is one of its tested versions."""
    found = source_hash(cls, method)
    versions = tested_versions().get(upstream_name(cls), {}).get(method, ())
    return any(version["hash"] == found for version in versions)


# Import name of a package -> its name in messages. Only these packages may have written a tested method and
# its decorators. PyTorch is one of them because of decorators such as ``torch.no_grad``.
_UPSTREAM = {"diffusers": "diffusers", "comfy": "ComfyUI", "torch": "PyTorch"}

# Function -> the hash of its code. The class and name of a method could not be the key: after other code has
# replaced the method, the stored hash would be wrong.
_hashes: weakref.WeakKeyDictionary[types.FunctionType, str | None] = weakref.WeakKeyDictionary()


def source_hash(cls: Any, method: str) -> str | None:
    """The hash of the code of a method or property, with the decorators in its source.

    None if the code cannot be read, or is not of diffusers, ComfyUI or PyTorch. If other code has wrapped the
    method, the result is None too, even if ``functools.wraps`` makes the wrapper look like the method.
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
    """The syntax tree of ``function``, with its decorators.

    None if the code cannot be read, or is not of diffusers, ComfyUI or PyTorch.
    """
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
    """The syntax tree of ``function``; None if its source cannot be read.

    If a decorator has wrapped the function, the caller must pass the function inside of the wrapper.
    """
    for source in (_source_of, inspect.getsource):
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError, SyntaxError):
            [definition] = ast.parse(textwrap.dedent(source(function))).body
            return definition if isinstance(definition, ast.FunctionDef) else None
    return None


def _source_of(function: types.FunctionType) -> str:
    """Returns what ``inspect.getsource`` returns, in a tenth of the time, because it does not tokenize.

    The function's last line with bytecode is known. The source ends before the first later line whose indent
    is not larger than that of the function's first line. If this later line is the inside of a string, the
    result cannot be parsed, and the caller uses ``inspect.getsource``.
    """
    lines, first = inspect.findsource(function)
    last = start = max(line for *_, line in function.__code__.co_lines() if line is not None)
    for i, line in enumerate(lines[start:], start + 1):
        if line.strip() and not line.lstrip().startswith("#"):
            if _indent(line) <= _indent(lines[first]):
                break
            last = i
    return "".join(lines[first:last])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def hash_of(definition: ast.FunctionDef) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the code of ``definition``.

    Whitespace, comments, docstrings and annotations of signatures do not change the hash. All versions of
    Python compute the same hash.
    """
    return hashlib.sha256(_dump(computed(definition)).encode()).hexdigest()[:16]


def computed(definition: ast.FunctionDef) -> ast.FunctionDef:
    """Remove docstrings and the annotations of signatures from ``definition``, and return ``definition``."""
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
    """Returns the text of ``ast.dump`` without empty fields, in which versions of Python differ."""
    if isinstance(part, list):
        return f"[{','.join(map(_dump, part))}]"
    if not isinstance(part, ast.AST):
        return ascii(part)
    fields = (f"{name}={_dump(value)}" for name, value in ast.iter_fields(part) if value not in (None, []))
    return f"{type(part).__name__}({','.join(fields)})"


def _is_upstreams(link: Any) -> bool:
    # ``__globals__`` has the name of the Python module in which the function ``link`` was defined.
    # ``__module__`` may name another one: functools.wraps copies it from the wrapped function to the wrapper.
    module = getattr(link, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] in _UPSTREAM


class Untested(str):
    """The reason to skip a module if a method of diffusers or ComfyUI has code that was never tested.

    The class lets ``optimize`` tell these reasons from other reasons, which are plain strings. ``file``: the
    path of the file with the untested code, relative to the folder of the release, such as "comfy/ops.py".
    """

    __slots__ = ("file",)
    file: str

    @property
    def method(self) -> str:
        """The name of the untested method, as ``Class.method``."""
        return self.partition(" ")[0]


def unknown_source(*sources: TestedSource) -> Untested | None:
    """Why a module is skipped, if a method of ``sources`` has code that was never tested; else None."""
    for cls, methods in sources:
        for method in methods:
            if not is_known(cls, method):
                package = _UPSTREAM.get(upstream_name(cls).partition(".")[0], "diffusers")
                name = f"{cls.__name__}.{method}"
                found = Untested(f"{name} of this {package} is not a version that sdfastgn was tested with")
                found.file = file_of(cls)
                return found
    return None


def file_of(cls: Any) -> str:
    """The path of the file with the class or Python module ``cls``, relative to the folder of the release."""
    name = cls.__name__ if isinstance(cls, types.ModuleType) else cls.__module__
    return f"{name.replace('.', '/')}.py"


def how_to_compare(files: Iterable[str]) -> str:
    """Tells a user how to compare the installed ``files`` of ComfyUI with the newest tested release."""
    *most, last = sorted({*files, OF_COMFYUI})
    needed = f"{', '.join(most)} and {last}" if most else last
    return (
        f"fetch {needed} of ComfyUI {newest_release('comfy')} into a folder, then run "
        "`sdfastgn sources --comfyui CHECKOUT --against FOLDER`"
    )
