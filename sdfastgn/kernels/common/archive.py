"""Exports compiled kernels to a file, and imports such a file into Triton's cache on another machine.

Both machines must have the same GPU, the same versions of Triton, torch and Python, CPUs of the same
architecture, and the same source code of the kernels. The file is a zip archive. It has a manifest, and for
each kernel its code for the GPU and Triton's description of it. In Triton's cache, the name of a kernel is a
hash of its source, constants and compiler, so Triton never launches a kernel that does not fit. ``load``
compares the manifest with this machine before it adds any kernel.

The archive has no code for the CPU: Triton builds its launchers (up to Triton 3.6 one for each signature)
with the C compiler of the machine on which they run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sdfastgn.kernels.common.gpu import triton

# Environment variable with the path of an archive that is read before the first kernel is compiled.
VARIABLE = "SDFASTGN_KERNEL_ARCHIVE"
_MANIFEST = "manifest.json"
# Version of the archive's layout.
_FORMAT = 1
# The path of a kernel's file in the archive: the kernel's hash, then the file's name in Triton's cache. The
# suffixes mean: code for NVIDIA's GPUs, code for AMD's GPUs, Triton's description.
_MEMBER = re.compile(r"([0-9a-f]{64})/(\w{1,150}\.(?:cubin|hsaco|json))")

# Hash of a kernel -> {name: path} of its files in Triton's cache, for each kernel that this process has
# launched.
_launched: dict[str, dict[str, str]] = {}


class ArchiveError(ValueError):
    """Raised if an archive cannot be used here. The message names the file, and what is wrong with it."""


class Imported(NamedTuple):
    """Result of ``load``.

    ``added``: number of kernels that were added to Triton's cache. ``present``: number of kernels that the
    cache had already.
    """

    added: int
    present: int


def triton_cache() -> Path:
    """The folder in which Triton keeps compiled kernels."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def note(compiled: Any) -> None:
    """Record a compiled kernel, so that ``export`` writes it."""
    _launched[compiled.hash] = compiled.metadata_group


def export(path: Path, device: torch.device) -> int:
    """Write all kernels that this process has launched, on any device, to ``path``. Returns their number.

    ``device``: the GPU whose name goes into the manifest. ``load`` accepts the archive only for such a GPU.

    Raises OSError if a file cannot be read or written. Then ``path`` is unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, json.dumps(_manifest(device), indent=1))
            for key, files in sorted(_launched.items()):
                for name, source in sorted(files.items()):
                    if _MEMBER.fullmatch(f"{key}/{name}"):
                        archive.writestr(f"{key}/{name}", Path(source).read_bytes())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(_launched)


def load(path: Path, device: torch.device) -> Imported:
    """Add the kernels of the archive at ``path`` to Triton's cache. A kernel that is already there is kept.

    Raises ArchiveError, before anything is written, if the archive is damaged, or if it was made for another
    GPU than ``device`` or with other versions than this process has.
    """
    from triton.runtime.cache import get_cache_manager

    kernels = _read(path, device)
    added = 0
    for key, files in kernels.items():
        manager = get_cache_manager(key)
        # An entry of Triton's cache that has any file is left alone: another process may be writing it.
        (described,) = (name for name in files if name.endswith(".json"))
        if manager.get_group(described) or any(map(manager.get_file, files)):
            continue
        manager.put_group(described, {name: manager.put(data, name) for name, data in files.items()})
        added += 1
    return Imported(added, len(kernels) - added)


@functools.cache
def add_named(device: torch.device) -> None:
    """Load the archive that the environment variable ``VARIABLE`` names, once for each device.

    Does nothing if the variable is not set. If the archive cannot be used, this only warns, and kernels are
    compiled as usual. So a program that sets the variable also runs on GPUs that the archive was not made
    for.
    """
    path = os.environ.get(VARIABLE)
    if path and device.type == "cuda":
        try:
            load(Path(path), device)
        except (ArchiveError, OSError) as error:
            warnings.warn(f"{VARIABLE}: {error}. Kernels are compiled instead.", stacklevel=2)


def _manifest(device: torch.device) -> dict[str, Any]:
    """The properties that must be equal on the machine that makes an archive and the machine that uses it."""
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "format": _FORMAT,
        "GPU": torch.cuda.get_device_name(device),
        "compute capability": f"{major}.{minor}",
        "Triton": triton.__version__,
        "torch": str(torch.__version__),
        "Python": f"{'.'.join(platform.python_version_tuple()[:2])} on {platform.machine()}",
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


def _read(path: Path, device: torch.device) -> dict[str, dict[str, bytes]]:
    """Returns {hash of a kernel: {name: content} of its files}. Raises ArchiveError as ``load`` does."""
    try:
        with zipfile.ZipFile(path) as archive:
            there = json.loads(archive.read(_MANIFEST))
            for what, wanted in _manifest(device).items():
                if there.get(what) != wanted:
                    values = f"{there.get(what)!r}, here it is {wanted!r}"
                    raise ArchiveError(f"{str(path)!r} was made for another {what}: {values}")
            members = {name: archive.read(name) for name in archive.namelist() if name != _MANIFEST}
    except ArchiveError:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        KeyError,
        ValueError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise ArchiveError(f"{str(path)!r} is no archive of kernels: {error}") from error
    kernels: dict[str, dict[str, bytes]] = {}
    for name, data in members.items():
        found = _MEMBER.fullmatch(name)
        if found is None:
            raise ArchiveError(f"{str(path)!r} is no archive of kernels: it has a file {name!r}")
        kernels.setdefault(found[1], {})[found[2]] = data
    for key, files in kernels.items():
        _check_kernel(path, key, files)
    return kernels


def _check_kernel(path: Path, key: str, files: dict[str, bytes]) -> None:
    """Raise ArchiveError unless ``files`` are one description with the hash ``key`` and one file of code."""
    described = [name for name in files if name.endswith(".json")]
    code = [name for name in files if not name.endswith(".json")]
    try:
        fits = len(described) == len(code) == 1 and json.loads(files[described[0]])["hash"] == key
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise ArchiveError(f"{str(path)!r} is no archive of kernels: {key} is not one kernel with its code")
