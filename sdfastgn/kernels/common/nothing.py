"""A kernel that does nothing. Its compilation makes Triton do what it does only once in a process."""

from __future__ import annotations

import triton


@triton.jit
def nothing(x_ptr):
    """``x_ptr``: any pointer."""
