"""``sdfastgn sources``: lists methods of diffusers and ComfyUI whose installed code was never tested."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
from packaging.version import Version
from rich.console import Console

from sdfastgn.cli.comfyui_checkout import import_comfyui
from sdfastgn.patches.graphs.factors import readers
from sdfastgn.patches.registry import FUSIONS, MISSING, OBJECT_FUSIONS
from sdfastgn.patches.swap import tested_sources
from sdfastgn.patches.swap.tested_sources import (
    OF_COMFYUI,
    computed,
    file_of,
    hash_of,
    how_to_compare,
    is_known,
    source_hash,
    tested_versions,
    upstream_definition,
    upstream_name,
)
from sdfastgn.program import OptionError, writing


class _Method(NamedTuple):
    """A method of diffusers or ComfyUI, as it is installed."""

    cls: Any
    name: str

    @property
    def package(self) -> str:
        return upstream_name(self.cls).partition(".")[0]

    @property
    def versions(self) -> list[dict[str, str]]:
        """The tested versions of the method's code, the oldest first.

        Each has the code's ``hash``. Most have ``first_seen``, the release in which the code was first seen.
        """
        return tested_versions().get(upstream_name(self.cls), {}).get(self.name, [])


def print_sources(
    out: Console, *, against: Path | None = None, comfyui: Path | None = None, accept: bool = False
) -> int:
    """List the methods of diffusers and ComfyUI whose installed code is unknown, because it was never tested.

    ``tested_sources.json`` has the hashes of the tested versions of each method's code. Only methods that
    fusions replace or rely on are looked at, and those that CUDA graphs rely on (``factors.readers``).

    Returns 1 if an unknown method is left that was not accepted, or if fusions cannot be imported with this
    diffusers (``registry.MISSING``). Else returns 0.

    Args:
        out: where to print.
        against: an earlier release: a diffusers wheel, a folder that is or contains the package diffusers, or
            a checkout of diffusers or ComfyUI. For each unknown method, its changes since this release are
            printed.
        comfyui: a checkout of ComfyUI, whose methods are looked at too.
        accept: if True, write the hashes of the unknown methods into ``tested_sources.json``. Then they are
            known.
    """
    files = None if against is None else _release_files(against)
    releases = {"diffusers": diffusers.__version__}
    fusions: list[Any] = [*FUSIONS, *OBJECT_FUSIONS, *readers()]
    if comfyui is not None:
        releases["comfy"], blocks = _comfyui_release(comfyui)
        fusions += blocks
    users = _methods_of(fusions)
    for file, reason in MISSING.items():
        _print(out, f"{file}: left out, {reason}")
    unknown = [method for method in users if not is_known(*method)]
    for method in unknown:
        found = source_hash(*method)
        state = "it is gone, or other code has replaced it" if found is None else f"unknown ({found})"
        _print(out, f"{upstream_name(method.cls)}.{method.name}, for {', '.join(users[method])}: {state}")
        if found is not None and files is not None:
            for line in _difference(files, method):
                _print(out, f"    {line}")
    for package, release in releases.items():
        total, left = (sum(each.package == package for each in some) for some in (users, unknown))
        _print(out, f"{package} {release}: {total - left} of {total} methods are known")
    if accept:
        unknown = _accept(out, unknown, releases)
    elif unknown:
        _print(out, _advice(unknown, has_diff=files is not None))
    return int(bool(unknown or MISSING))


def _methods_of(fusions: Iterable[Any]) -> dict[_Method, list[str]]:
    """Returns upstream method -> names of the fusions that replace or rely on this method."""
    users: dict[_Method, list[str]] = {}
    for fusion in fusions:
        for source in fusion.sources:
            for name in source.methods:
                users.setdefault(_Method(source.cls, name), []).append(fusion.name)
    return users


def _comfyui_release(folder: Path) -> tuple[str, tuple[Any, ...]]:
    """Import the checkout ``folder`` of ComfyUI. Returns (its release, the fusions for ComfyUI's blocks)."""
    if not _has_file(folder, OF_COMFYUI):
        raise OptionError(f"--comfyui: no checkout of ComfyUI, got {str(folder)!r}")
    release = import_comfyui(str(folder), "--cpu")
    from sdfastgn.patches.comfyui.inject import CLAIMING

    return release, CLAIMING


def _release_files(against: Path) -> Any:
    """Open a release: a wheel of diffusers, a folder that is or contains the package, or a checkout.

    The checkout can be of diffusers or of ComfyUI. Returns the folder that contains the package, with
    pathlib's interface. Raises OptionError if ``against`` is none of these.
    """
    # The path must be absolute, because the parent of the path "." is "." again.
    place = Path(os.path.abspath(against))
    every: list[Any] = [place, place.parent, place / "src"]
    if zipfile.is_zipfile(against):
        every = [zipfile.Path(against)]
    elif place.name not in ("diffusers", "comfy"):  # the package's folder is named diffusers or comfy
        every.remove(place.parent)
    for files in every:
        if _has_file(files, "diffusers/__init__.py") or _has_file(files, OF_COMFYUI):
            return files
    raise OptionError(f"--against: no wheel or folder of diffusers or ComfyUI, got {str(against)!r}")


def _has_file(files: Any, name: str) -> bool:
    try:
        return bool((files / name).is_file())
    except OSError:  # the path is too long, or access is denied: the file counts as missing
        return False


def _print(out: Console, line: str) -> None:
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def _difference(files: Any, method: _Method) -> Iterator[str]:
    """Yields the lines of a diff of a method's code: from the release in ``files`` to the installed code.

    If the release lacks the method, or its code there was never tested, yields only one line, which says so.
    """
    function: Any = getattr(method.cls, method.name)
    function = function.fget if isinstance(function, property) else function
    new: Any = upstream_definition(function)
    inner = inspect.unwrap(function)
    old = _definition(files, inner.__module__, inner.__qualname__)
    if old is None or hash_of(old) not in [version["hash"] for version in method.versions]:
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


def _advice(unknown: list[_Method], *, has_diff: bool) -> str:
    """A text that says what the user can do about the ``unknown`` methods.

    ``has_diff``: True if the changes of each method were printed.
    """
    last = [method.versions[-1] for method in unknown if method.package == "diffusers" and method.versions]
    seen = [version["first_seen"] for version in last if "first_seen" in version]
    if has_diff:
        return "Read each change and make it in the fused forward if it matters. Then add --accept"
    if not seen and any(method.package == "comfy" for method in unknown):
        return f"To see what changed: {how_to_compare(file_of(method.cls) for method in unknown)}"
    if not seen:
        return "To see what changed: add --against with a release in which they are known"
    # The installed code of an unknown method is not in ``tested_sources.json``, but earlier code of most
    # methods is. ``seen``: for each method, the release in which the last tested version of its code was
    # first seen. The latest of these releases has the last tested code of all these methods.
    release = max(seen, key=Version)
    return (
        f"To see what changed: pip download --no-deps diffusers=={release}, then\n"
        f"sdfastgn sources --against diffusers-{release}-py3-none-any.whl"
    )


def _accept(out: Console, unknown: list[_Method], releases: dict[str, str]) -> list[_Method]:
    """Add the hashes of the ``unknown`` methods to ``tested_sources.json``.

    Returns the methods that have no hash, because their code cannot be found.
    """
    versions = tested_versions()
    left = []
    for method in unknown:
        found = source_hash(*method)
        if found is None:
            left.append(method)
            continue
        entry = {"hash": found, "first_seen": releases[method.package]}
        versions.setdefault(upstream_name(method.cls), {}).setdefault(method.name, []).append(entry)
    if len(left) < len(unknown):
        file = tested_sources.FILE
        with writing(file):
            file.write_text(text_of(versions), encoding="utf-8")
        _print(out, f"{len(unknown) - len(left)} accepted, in {file}")
    return left


def text_of(versions: dict[str, dict[str, list[dict[str, str]]]]) -> str:
    """Returns the text of ``tested_sources.json`` for ``versions``: class -> method -> its tested versions.

    Classes are sorted. Each version is a line.
    """
    text = json.dumps(dict(sorted(versions.items())), indent=2)
    return re.sub(r"\{\s*([^{}]*?)\s*\}", lambda found: "{" + " ".join(found[1].split()) + "}", text) + "\n"
