"""Joins the processes that ``accelerate launch`` or ``torchrun`` started. Each has its own device."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

from sdfastgn.program import OptionError, launched

# Maximum time that a process waits for the slowest process, which may compile or draw images for a day.
# NCCL's default is ten minutes.
PATIENCE = datetime.timedelta(days=2)


@contextlib.contextmanager
def joined(device: str) -> Iterator[tuple[Any, str]]:
    """A context in which this process works together with the other launched processes.

    Yields accelerate's ``PartialState``, and the device of this process. If no launcher started this process,
    it is the only one, and its device is ``device``.
    """
    if launched() and device not in ("cuda", "cpu"):
        raise OptionError(f"--device: each process has its own GPU, got {device!r}; give cuda or cpu")
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
    yield state, str(state.device) if launched() and device == "cuda" else device
    # All processes must destroy their group at about the same time, else PyTorch may hang. After an error the
    # group is kept, because other processes may still wait for this process elsewhere.
    state.destroy_process_group()
