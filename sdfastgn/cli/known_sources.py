"""Which of the upstream methods that the fusions rely upon are known here, and what changed in the others."""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
from rich.console import Console

from sdfastgn.patches.core.tested_sources import computed, hash_of, source_hash, upstream_definition
from sdfastgn.patches.registry import FUSIONS, MISSING, OBJECT_FUSIONS
from sdfastgn.program import OptionError

# A release of which every method is known.
KNOWN_RELEASE = "0.42.1"


def print_sources(out: Console, against: Path | None) -> int:
    """List the methods. ``against`` is a release in which the unknown ones are known.

    Returns 0 if all are known, else 1.
    """
    files = None if against is None else _release(against)
    for file, reason in MISSING.items():
        _print(out, f"{file}: left out, {reason}")
    unknown = len(MISSING)
    for fusion in (*FUSIONS, *OBJECT_FUSIONS):
        for cls, hashes in fusion.sources:
            for method, known in hashes.items():
                found = source_hash(cls, method)
                is_known = found in known
                state = "known" if is_known else f"unknown ({found})"
                _print(out, f"{fusion.name}: {cls.__name__}.{method}: {state}")
                unknown += not is_known
                if not is_known and files is not None:
                    for line in _difference(files, getattr(cls, method, None), known):
                        _print(out, f"    {line}")
    _print(out, f"diffusers {diffusers.__version__}: {unknown} unknown")
    if unknown and files is None:
        _print(out, f"To see what changed: pip download --no-deps diffusers=={KNOWN_RELEASE}, then")
        _print(out, f"sdfastgn sources --against diffusers-{KNOWN_RELEASE}-py3-none-any.whl")
    return int(unknown > 0)


def _print(out: Console, line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def _release(against: Path) -> Any:
    """The files of a wheel, or of a folder in which ``diffusers`` lies."""
    files: Any = zipfile.Path(against) if zipfile.is_zipfile(against) else against
    with contextlib.suppress(OSError):  # too long for a name, or not ours to look at
        if (files / "diffusers" / "__init__.py").is_file():
            return files
    raise OptionError(f"--against: no wheel of diffusers and no folder that has one, got {str(against)!r}")


def _difference(files: Any, function: Any, known: tuple[str, ...]) -> Iterator[str]:
    """What ``function`` computes here and not in the release, as the lines of a diff."""
    function = function.fget if isinstance(function, property) else function
    new = upstream_definition(function) if inspect.isfunction(function) else None
    if new is None:
        yield "it is gone, or other code has replaced it"
        return
    inner = inspect.unwrap(function)
    old = _definition(files, inner.__module__, inner.__qualname__)
    if old is None or hash_of(old) not in known:
        yield "it is not known in that release either"
        return
    before, after = (ast.unparse(computed(each)).splitlines() for each in (old, new))
    yield from difflib.unified_diff(before, after, "known", "installed", lineterm="")


def _definition(files: Any, module: str, name: str) -> ast.FunctionDef | None:
    path = files / (module.replace(".", "/") + ".py")
    if not path.is_file():
        return None
    node: Any = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next((each for each in getattr(node, "body", ()) if getattr(each, "name", "") == part), None)
    return node if isinstance(node, ast.FunctionDef) else None
