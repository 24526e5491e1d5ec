"""Processes of ``accelerate launch`` or ``torchrun``, each with a device of its own."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

from sdfastgn.program import OptionError, launched

# How long a process waits for the slowest: its compiling, or its share of a day's images. NCCL
# would give up after ten minutes.
PATIENCE = datetime.timedelta(days=2)


@contextlib.contextmanager
def joined(device: str) -> Iterator[tuple[Any, str]]:
    """Accelerate's ``PartialState`` and the name of this process's device, with the others met.

    A process that was not launched is the only one, and has ``device``.
    """
    if launched() and device not in ("cuda", "cpu"):
        raise OptionError(f"--device: each process has a GPU of its own, got {device!r}; give cuda or cpu")
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
    yield state, str(state.device) if launched() and device == "cuda" else device
    state.destroy_process_group()  # not after an error: others may still wait for this process
