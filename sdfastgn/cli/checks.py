"""Checks of options that need neither torch nor diffusers, so that a bad option is reported at once.

A check raises OptionError if a value is not valid. Most checks return the value if it is valid. ``option``:
the name of the option, for the error.
"""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sdfastgn.models.configurations import DTYPES
from sdfastgn.program import OptionError

# Matches a whole number of at most 18 digits, which fits into 64 bits. Without a limit, ``int`` would fail
# for numbers of thousands of digits.
DIGITS = r"\d{1,18}"
_NUMBER = re.compile(rf"-?{DIGITS}")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def one_of(option: str, value: str, allowed: Collection[str]) -> str:
    if value not in allowed:
        raise OptionError(f"{option}: unknown value {value!r}; choose from {', '.join(allowed)}")
    return value


def some_of(option: str, values: str | Sequence[str], allowed: Collection[str]) -> list[str]:
    """Return ``values`` as a list without repetitions. A text is read as a comma-separated list.

    Raises OptionError if there is no value, or if a value is not in ``allowed``.
    """
    values = split(values) if isinstance(values, str) else values
    if not values:
        raise OptionError(f"{option}: no value given; choose from {', '.join(allowed)}")
    return [one_of(option, value, allowed) for value in dict.fromkeys(values)]


def dtype_word(option: str, value: str) -> str:
    """Return a key of ``DTYPES`` such as fp16. ``value`` is this key, or torch's name such as float16."""
    short = {full: name for name, full in DTYPES.items()}
    return one_of(option, short.get(value, value), DTYPES)


def split(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def positive(option: str, value: int) -> int:
    if value < 1:
        raise OptionError(f"{option}: must be a positive whole number, got {value}")
    return value


def whole_numbers(option: str, value: int | str) -> list[int]:
    """Return the positive whole numbers in ``value``, a number or a comma-separated list, each once."""
    entries = split(str(value))
    if not entries or not all(_NUMBER.fullmatch(entry) for entry in entries):
        raise OptionError(f"{option}: must be a positive whole number or a list such as 1,4, got {value!r}")
    return [positive(option, int(entry)) for entry in dict.fromkeys(entries)]


def image_size(option: str, value: int, scale: int = 8) -> int:
    """Return ``value`` if it is a positive multiple of ``scale``.

    ``scale``: number of pixels along a side that one position of the latent covers.
    """
    if value < scale or value % scale:
        wanted = f"a positive multiple of {scale} (one latent covers {scale}x{scale} pixels)"
        raise OptionError(f"{option}: must be {wanted}, got {value}")
    return value


def device_word(option: str, value: str | None) -> str | None:
    """Return ``value`` if it has the form of a device's name, such as cuda:1.

    This does not check whether the machine has the device, because that needs torch.
    """
    if value is not None and not _DEVICE.fullmatch(value):
        raise OptionError(f"{option}: cannot use {value!r}; give cuda, cuda:N or cpu")
    return value


def warn_of_path(option: str, value: str, instead: str) -> None:
    """Warn that ``value`` is read as a name, although a path with this name exists.

    ``instead``: what the user can write to name the path.
    """
    warnings.warn(f"{option}: {value!r} is read as a name; for the path give {instead}", stacklevel=3)


def weights_source(option: str, value: str, *, words: Sequence[str] = ("random",)) -> str:
    """Return ``value`` if it is one of ``words`` or an existing path, or looks like a Hub id (owner/name).

    If ``value`` is one of ``words`` and also an existing path, a warning says that the word is meant.
    """
    try:
        exists = bool(value) and Path(value).expanduser().exists()
        if value in words and exists:
            warn_of_path(option, value, f"./{value}")
        if value in words or exists:
            return value
    except (OSError, RuntimeError) as error:  # the path is too long, or ~NAME in it names no user
        raise OptionError(f"{option}: cannot look at {value!r}: {_why(error)}") from None
    if _HUB_ID.fullmatch(value) and not value.startswith("."):
        return value
    choice = ", ".join((*words, "a path", "or a Hub id (owner/name)"))
    raise OptionError(f"{option}: no such path {value!r}; give {choice}")


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def file_path(option: str, value: Path | None) -> Path | None:
    """Return ``value`` if it is None, or a path at which a file can be written. Else raise OptionError.

    The folder of the file must exist. It is not made here, because a missing folder may be a typing error.
    """
    if value is None:
        return None
    real = Path(os.path.realpath(value))  # ``realpath`` follows links, even if their target does not exist
    try:
        if not real.parent.exists():
            raise OptionError(f"{option}: there is no folder {str(real.parent)!r}; make it first")
        if real.is_file() or real.is_dir():
            real.open("ab").close()
        elif not real.exists():  # an existing pipe is not opened: closing it would end its reader's input
            real.open("xb").close()
            real.unlink()
    except OSError as error:
        raise OptionError(f"{option}: cannot write a file at {str(value)!r}: {_why(error)}") from None
    return value


def file_paths(outputs: Mapping[str, Path | None], read: Iterable[Path] = ()) -> None:
    """Check that each output file can be written, and that no file is used twice.

    ``outputs``: option -> path of the file that the command will write, or None. ``read``: the files that the
    command reads, which it must not overwrite.
    """
    taken = {os.path.realpath(path): "RESULTS" for path in read}
    for option, path in outputs.items():
        if file_path(option, path) is None:
            continue
        real = os.path.realpath(str(path))
        if real in taken:
            raise OptionError(f"{option}: {str(path)!r} is the file of {taken[real]} too; give another path")
        taken[real] = option


def folder(option: str, value: str) -> Path:
    """Return ``value`` as a path if its parent folder exists. The folder itself need not exist."""
    if not value:  # an empty path is refused: pathlib would read it as the current folder
        raise OptionError(f"{option}: must be a folder, got ''; give . for the current one")
    real = Path(os.path.realpath(value))
    try:
        if not real.parent.exists():
            raise OptionError(f"{option}: there is no folder {str(real.parent)!r}; make it first")
    except OSError as error:
        raise OptionError(f"{option}: cannot look at {value!r}: {_why(error)}") from None
    return Path(value)


def folder_file(option: str, path: Path, name: str) -> None:
    """Check that a file ``name`` can be written in the folder ``path``. A missing folder is not made."""
    if path.is_dir():
        file_path(option, path / name)
        return
    try:
        if os.path.lexists(path):  # a file or a dangling link has the folder's path
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        beside = path.parent / name  # a file is made and deleted, to see whether a folder could be made here
        beside.open("xb").close()
        beside.unlink()
    except OSError as error:
        raise OptionError(f"{option}: cannot make a folder at {str(path)!r}: {_why(error)}") from None
