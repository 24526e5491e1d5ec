"""What the command line and the benchmarks share: a program's name, its errors, its launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["OWN_PROCESS", "OptionError", "counted", "is_main", "launched", "program"]

# What a command's context holds where the whole process is there for that command.
OWN_PROCESS = "own process"


class OptionError(ValueError):
    """A user's option that cannot be used, in one line: the option, the value, and what is allowed."""


def program() -> str:
    """``sdfastgn``, or a script's file name."""
    name = Path(sys.argv[0]).name
    return name if name.endswith(".py") and name != "__main__.py" else "sdfastgn"


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 image``, ``2 images``. ``plural`` is for nouns whose plural has more than an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def launched() -> bool:
    """Whether a launcher started this process. ``torchrun`` says so of a single one too."""
    return "LOCAL_RANK" in os.environ


def is_main() -> bool:
    """Whether this process prints and writes what all processes have measured or drawn."""
    return os.environ.get("RANK", "0") == "0"
