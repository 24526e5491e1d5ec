"""The folder with plans: one file a key.

A file begins with a hash of its content, and its content with its key. A file that is damaged, or that is no
such file, is removed. A folder that cannot be read or written is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Environment variable with the folder. Without it, no plan is read or written.
VARIABLE = "SDFASTGN_PLAN_CACHE"
# Bytes (256 MB). If the files have more, the files that were not used for the longest time go.
MOST = 1 << 28


def folder() -> Path | None:
    """The folder, which may not exist; None if plans are not kept on disk."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def load(key: str) -> str | None:
    """The text that was saved for ``key``; None if there is none."""
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
    """Keeps ``text`` for ``key``, if that is possible. Other processes see the whole file or none."""
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
    """(time of last use, size, path) of each file. A process that was killed may have left partial ones."""
    for path in where.iterdir():
        if path.suffix in (".plan", ".partial"):
            with contextlib.suppress(OSError):  # another process may remove it
                status = path.stat()
                yield status.st_mtime, status.st_size, path
