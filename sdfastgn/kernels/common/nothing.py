"""A kernel that does nothing, for the work that Triton does once in a process, at its first compilation.

For example, Triton then hashes its own library.
"""

from __future__ import annotations

import triton


@triton.jit
def nothing(x_ptr):
    """Does nothing. ``x_ptr``: any pointer."""
