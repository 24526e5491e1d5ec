"""A kernel that does nothing. It is compiled in a thread, before other kernels are needed.

Triton's first compilation in a process is slow: for example, Triton then hashes its own library.
"""

from __future__ import annotations

import triton


@triton.jit
def nothing(x_ptr):
    """Does nothing. ``x_ptr``: any pointer."""
