"""Reads and writes the files of a folder in which plans are kept: the rewritten graphs of traced calls.

There is one file for each key, which is a hash of all that the plan depends on. The first line of a file is a
hash of the rest. The second line is the key, and after that comes the text of the plan. A file is removed if
a hash or key does not match. If the folder cannot be read or written, plans are not kept, and no error is
raised.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Name of the environment variable that names the folder. If it is not set, no plan is read or written.
VARIABLE = "SDFASTGN_PLAN_CACHE"
# Bytes (256 MB) that all files together may take. If they take more, those that were not used for the longest
# time are removed.
MOST = 1 << 28


def folder() -> Path | None:
    """The path of the folder with plans, which may not exist. None if plans are not kept on disk."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def load(key: str) -> str | None:
    """Returns the text of the plan that was saved for ``key``. None if there is none."""
    path = _path(key)
    if path is None:
        return None
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
        own, _, text = content.partition(b"\n")
        if digest.decode() != hashlib.sha256(content).hexdigest() or own.decode() != key:
            raise ValueError("damaged")
        with contextlib.suppress(OSError):
            os.utime(path)
        return text.decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        remove(key)
        return None


def save(key: str, text: str) -> None:
    """Saves ``text``, a plan, for ``key``. Does nothing if the folder cannot be written.

    Other processes see the whole file or none, because a finished file is renamed into its place.
    """
    path = _path(key)
    if path is None:
        return
    content = f"{key}\n{text}".encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            os.replace(partial, path)
        finally:
            Path(partial).unlink(missing_ok=True)
        _make_room(path)


def remove(key: str) -> None:
    """Removes the file of ``key``, if there is one."""
    path = _path(key)
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _path(key: str) -> Path | None:
    where = folder()
    return None if where is None else where / f"{key}.plan"


def _make_room(kept: Path) -> None:
    found = sorted(_files(kept.parent))
    total = sum(size for _, size, _ in found)
    for _, size, path in found:
        if total > MOST and path != kept:
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def _files(where: Path) -> Iterator[tuple[float, int, Path]]:
    """Yields (time of last use, size in bytes, path) for each file of the folder.

    Files with the suffix ".partial" count too: a process that was killed may have left them.
    """
    for path in where.iterdir():
        if path.suffix in (".plan", ".partial"):
            with contextlib.suppress(OSError):  # files are left out that another process removes meanwhile
                status = path.stat()
                yield status.st_mtime, status.st_size, path
