"""Archives of compiled kernels: files whose kernels are added to Triton's cache, and need not be compiled.

An archive is a zip file. It has a manifest, and for each kernel its code for the GPU and Triton's description
of it. Its kernels are for one compute capability, one version of Triton and one version of the kernels'
source. ``load`` compares these with this machine before it adds any kernel.

In Triton's cache, the name of a kernel is a hash of its source, its constants, its options, and of Triton's
own files. So Triton never launches a kernel that was compiled from something else. Triton's files differ
between versions of Python, and the kernels do not. So the manifest has the hashes of everything but Triton's
files, and ``load`` computes the name with the files of this Triton. An archive can be used with any Python.

The archive has no code for the CPU: Triton builds its launchers (up to Triton 3.6 one for each signature)
with the C compiler of the machine on which they run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import threading
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sdfastgn.kernels.common.gpu import triton
from sdfastgn.kernels.common.private import current_device

# Environment variable with the path of an archive of compiled kernels, which is read before the first kernel
# is compiled.
VARIABLE = "SDFASTGN_KERNEL_ARCHIVE"
# Name of the optional package that contains archives of compiled kernels (integrations/compiled). Archives
# are read from the package if the environment variable SDFASTGN_KERNEL_ARCHIVE is not set.
PACKAGE = "sdfastgn_compiled"
_MANIFEST = "manifest.json"
# Version of the layout of an archive of compiled kernels.
_FORMAT = 2
# Pattern of the path of a file in an archive of compiled kernels: the kernel's hash, then the file's name in
# Triton's cache. The suffixes mean: code for NVIDIA's GPUs, code for AMD's GPUs, Triton's description of the
# kernel.
_MEMBER = re.compile(r"([0-9a-f]{64})/(\w{1,150}\.(?:cubin|hsaco|json))")
# Maximum length of a kernel's name in Triton's file names.
_LONGEST_NAME = 150
# Errors that mean that an archive file is damaged: ``zipfile``, ``json`` or the code that reads the manifest
# raises them. An OSError comes from a seek to a negative position in the file.
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError, AttributeError, RuntimeError,
    OSError,
)  # fmt: skip

# Maps a device to a text that says whether ``add_archives`` has loaded an archive of compiled kernels for it,
# or why not. The value is None if there is no archive.
_states: dict[torch.device, str | None] = {}
_lock = threading.Lock()


class ArchiveError(ValueError):
    """Raised if an archive of compiled kernels cannot be read, or does not fit this GPU, Triton or source."""


class Imported(NamedTuple):
    """Numbers of kernels in an archive that was loaded into Triton's cache: the result of ``load``.

    ``added``: number of kernels that were added to Triton's cache. ``present``: number of kernels that the
    cache had already.
    """

    added: int
    present: int


class Kernel(NamedTuple):
    """What determines the code of a compiled kernel, apart from Triton's own files.

    Attributes:
        name: the name of the kernel's function.
        source, backend, options: Triton's hashes of the kernel's source and constants, of its target and
            assembler, and of its options.
        variables: names and values of the environment variables that change the compiled code.
    """

    name: str
    source: str
    backend: str
    options: str
    variables: dict[str, str]


class _Hashed(NamedTuple):
    """Replaces Triton's source, target or options when a kernel's name is computed. Has only their hash."""

    value: str

    def hash(self) -> str:
        return self.value


def can_record() -> bool:
    """True if Triton has the function ``get_cache_key``, by which archives compute the names of kernels."""
    from triton.runtime import cache

    return hasattr(cache, "get_cache_key")


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Kernel]]:
    """A context that records all kernels that Triton compiles or finds in its cache, as {hash: kernel}.

    It replaces Triton's function ``get_cache_key`` for the whole process. So it is for programs that do
    nothing else. Kernels that this process used before are not recorded.

    Raises ArchiveError if this version of Triton does not have this function.
    """
    from triton.compiler import compiler

    key_of = _key_function()
    found: dict[str, Kernel] = {}

    def record(src: Any, backend: Any, backend_options: Any, env_vars: dict[str, str]) -> str:
        key = key_of(src, backend, backend_options, env_vars)
        hashes = src.hash(), backend.hash(), backend_options.hash()
        found[_digest(key)] = Kernel(src.name[:_LONGEST_NAME], *hashes, dict(env_vars))
        return key

    compiler.get_cache_key = record
    try:
        yield found
    finally:
        compiler.get_cache_key = key_of


def export(path: Path, capability: tuple[int, int], recorded: dict[str, Kernel]) -> int:
    """Write the kernels ``recorded`` to an archive at ``path``. Returns the number of kernels written.

    ``recorded``: what the context ``recording`` has yielded. Kernels that could not be compiled are left out.
    ``capability``: the compute capability of the GPUs for which the kernels are.

    Raises OSError if a file cannot be read or written. Then ``path`` is unchanged.
    """
    from triton.runtime.cache import get_cache_manager

    groups = {
        key: get_cache_manager(key).get_group(f"{kernel.name}.json")
        for key, kernel in sorted(recorded.items())
    }
    kernels = {key: recorded[key]._asdict() for key, group in groups.items() if group}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            manifest = {**_conditions(capability), "kernels": kernels}
            archive.writestr(_entry(_MANIFEST), json.dumps(manifest, indent=1))
            for key in kernels:
                for name, source in sorted((groups[key] or {}).items()):
                    if _MEMBER.fullmatch(f"{key}/{name}"):
                        archive.writestr(_entry(f"{key}/{name}"), Path(source).read_bytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(kernels)


def _entry(name: str) -> zipfile.ZipInfo:
    """Describes a file in a zip archive: compressed, without a date. So equal kernels make equal archives."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def load(path: Path, device: torch.device) -> Imported:
    """Add the kernels of the archive at ``path`` to Triton's cache. A kernel that is already there is kept.

    Raises ArchiveError if the archive is damaged, or if it was made for another compute capability than that
    of ``device``, for another version of Triton or for other kernels. Then no kernel is added.
    """
    from triton.runtime.cache import get_cache_manager

    added = 0
    kernels = _read(path, device)
    for kernel, description, code in kernels:
        key = _digest(_key_function()(*map(_Hashed, kernel[1:4]), kernel.variables))
        manager = get_cache_manager(key)
        described = f"{kernel.name}.json"
        # A cache entry has a *group*, a list of its files, which is written last. An entry without a group is
        # not complete, and is written here. If another process is writing the same entry, it writes the same
        # content, and Triton replaces each file atomically.
        if manager.get_group(described):
            continue
        files = {**code, described: json.dumps({**description, "hash": key}).encode()}
        manager.put_group(described, {name: manager.put(data, name) for name, data in files.items()})
        added += 1
    return Imported(added, len(kernels) - added)


def file_name(capability: tuple[int, int]) -> str:
    """File name of the archive for this Triton and a compute capability, in the package sdfastgn_compiled."""
    return f"sm_{capability[0]}{capability[1]}-triton-{triton.__version__}.zip"


def is_of_these_kernels(path: Path) -> bool:
    """True if the kernels in the archive at ``path`` were compiled from the source that this process uses."""
    try:
        with zipfile.ZipFile(path) as archive:
            return json.loads(archive.read(_MANIFEST))["source of the kernels"] == _source_hash()
    except _DAMAGED:
        return False


def add_archives(device: torch.device) -> None:
    """Load an archive of compiled kernels, once for each device.

    The archive is the file that the environment variable SDFASTGN_KERNEL_ARCHIVE names. If it is not set, the
    archive comes from the package sdfastgn_compiled, if this is installed. If the archive cannot be used,
    this function only warns, and kernels are compiled as usual. So a program with an archive also runs on
    GPUs for which the archive was not made.
    """
    if device in _states or device.type != "cuda":
        return
    with _lock:
        if device not in _states:
            _states[device] = _add(device)


def state(device: torch.device) -> str | None:
    """Says in words whether an archive of compiled kernels was loaded for ``device``, or why not.

    Returns None if there is no archive, or if ``add_archives`` was not called yet. ``device`` without an
    index is the current GPU.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", current_device())
    return _states.get(device)


def _add(device: torch.device) -> str | None:
    named = os.environ.get(VARIABLE)
    where = VARIABLE if named else PACKAGE
    try:
        path = Path(named) if named else _packaged(device)
        if path is None:
            return None
        found = load(path, device)
    except Exception as error:  # without the archive, kernels are compiled as usual
        warnings.warn(f"{where}: {error}. Kernels are compiled instead.", stacklevel=2)
        return f"compiled kernels of {where} not used: {error}"
    return f"compiled kernels from {where}: {sum(found)}"


def _packaged(device: torch.device) -> Path | None:
    """Path of the archive in the package sdfastgn_compiled. None without the package, and on AMD's GPUs.

    Raises ArchiveError if the package has no archive for this GPU and Triton.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None or torch.version.hip is not None:
        return None
    folder = Path(found.origin).parent
    name = file_name(torch.cuda.get_device_capability(device))
    if not (folder / name).is_file():
        there = ", ".join(sorted(path.name for path in folder.glob("*.zip")))
        raise ArchiveError(f"it has no {name!r}, only {there or 'no archive at all'}")
    return folder / name


def _conditions(capability: tuple[int, int]) -> dict[str, Any]:
    """The properties that must be equal on the machine that makes an archive and the one that uses it."""
    return {
        "format": _FORMAT,
        "compute capability": "{}.{}".format(*capability),
        "Triton": triton.__version__,
        "source of the kernels": _source_hash(),
    }


@functools.cache
def _source_hash() -> str:
    """A hash of all source files of the kernels."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _key_function() -> Any:
    """Returns Triton's function that makes the text whose hash is the name of a kernel in Triton's cache.

    Raises ArchiveError if this version of Triton lacks the function.
    """
    from triton.runtime import cache

    if not can_record():
        raise ArchiveError(f"archives of kernels need a later Triton than {triton.__version__}")
    return cache.get_cache_key


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _read(path: Path, device: torch.device) -> list[tuple[Kernel, dict[str, Any], dict[str, bytes]]]:
    """Returns for each kernel of an archive (kernel, Triton's description, {file name: content} of its code).

    Raises ArchiveError if the archive is damaged, or does not fit this GPU, Triton or source.
    """
    # ``path.open`` raises OSError if the file cannot be opened. The caller gets this error as it is, because
    # the archive may be undamaged.
    with path.open("rb") as file:
        try:
            return _kernels_in(zipfile.ZipFile(file), device)
        except ArchiveError as error:
            raise ArchiveError(f"{str(path)!r} {error}") from None
        except _DAMAGED as error:
            raise ArchiveError(f"{str(path)!r} is no archive of kernels: {error}") from error


def _kernels_in(
    archive: zipfile.ZipFile, device: torch.device
) -> list[tuple[Kernel, dict[str, Any], dict[str, bytes]]]:
    """Returns for each kernel (kernel, Triton's description, {file name: content} of its code).

    Raises one of the errors ``_DAMAGED`` if the archive is damaged, and ArchiveError if the archive does not
    fit this GPU, Triton or source.
    """
    manifest = json.loads(archive.read(_MANIFEST))
    for what, here in _conditions(torch.cuda.get_device_capability(device)).items():
        if manifest.get(what) != here:
            values = f"{manifest.get(what)!r}, here it is {here!r}"
            raise ArchiveError(f"was made for another {what}: {values}")
    kernels = {key: Kernel(**parts) for key, parts in manifest["kernels"].items()}
    files: dict[str, dict[str, bytes]] = {key: {} for key in kernels}
    for name in archive.namelist():
        if name != _MANIFEST:
            key, file = _MEMBER.fullmatch(name).groups()  # type: ignore[union-attr]
            files[key][file] = archive.read(name)
    return [(kernel, *_parts_of(key, kernel, files[key])) for key, kernel in kernels.items()]


def _parts_of(key: str, kernel: Kernel, files: dict[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns Triton's description of a kernel, and {file name: content} of the kernel's code.

    Raises ValueError if ``files`` are not the description and the code of this kernel.
    """
    described = f"{kernel.name}.json"
    code = {name: data for name, data in files.items() if name != described}
    description = json.loads(files[described])
    is_known = all(isinstance(each, str) for each in kernel[:4]) and isinstance(kernel.variables, dict)
    if (
        not is_known
        or [name.partition(".")[0] for name in code] != [kernel.name]
        or description["hash"] != key
    ):
        raise ValueError(f"{key} is not one kernel with its code")
    return description, code
