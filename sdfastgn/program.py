"""Functions that the command line and the benchmarks share.

They raise the error for bad options and files, make texts for messages (the program's name, numbers with
nouns), and say whether a launcher such as torchrun started this process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# The value of click's ``Context.obj`` in a process that runs only one command of the command line. In such a
# process, a command may leave out large packages when it imports diffusers, so that it starts faster
# (``cli/light_imports.py``). In other processes, as in tests, a command must not do so.
OWN_PROCESS = "own process"


class OptionError(ValueError):
    """Raised if an option that the user gave cannot be used, or a file cannot be read or written.

    The message is one line that says what is wrong. Most messages name the option, its value, and what is
    allowed.
    """


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which the file ``path`` is written. If this fails, an OptionError says why."""
    try:
        yield
    except OSError as error:  # the file cannot be written, for example because the disk is full
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def program() -> str:
    """The program's name for messages: ``sdfastgn``, or the file name of a script."""
    name = Path(sys.argv[0]).name
    return name if name.endswith(".py") and name != "__main__.py" else "sdfastgn"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Returns a number and its noun, singular or plural, such as ``1 image`` or ``2 images``.

    ``plural``: the plural of the noun; empty if the plural is the noun with an s.
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def launched() -> bool:
    """True if a launcher such as ``torchrun`` started this process, even if it is the only process."""
    return "LOCAL_RANK" in os.environ


def is_main() -> bool:
    """True in the process of rank 0, which prints the results of all launched processes."""
    return os.environ.get("RANK", "0") == "0"
