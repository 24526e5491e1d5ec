"""What runs: the command line's own process, and the name that its messages begin with."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["OWN_PROCESS", "program"]

# What a command's context holds where the whole process is there for that command.
OWN_PROCESS = "own process"


def program() -> str:
    """``sdfastgn``, or a script's file name."""
    name = Path(sys.argv[0]).name
    return name if name.endswith(".py") and name != "__main__.py" else "sdfastgn"
