"""What runs: the name that the command line's messages begin with."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["program"]


def program() -> str:
    """``sdfastgn``, or a script's file name."""
    name = Path(sys.argv[0]).name
    return name if name.endswith(".py") and name != "__main__.py" else "sdfastgn"
