"""What the command line's messages share: the name that they begin with, and numbers of things."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["OWN_PROCESS", "counted", "program"]

# What a command's context holds where the whole process is there for that command.
OWN_PROCESS = "own process"


def program() -> str:
    """``sdfastgn``, or a script's file name."""
    name = Path(sys.argv[0]).name
    return name if name.endswith(".py") and name != "__main__.py" else "sdfastgn"


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 image``, ``2 images``. ``plural`` is for nouns whose plural has more than an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
