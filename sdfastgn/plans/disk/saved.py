"""``Saved``: the plan of one kind of call on disk."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from sdfastgn.plans.disk import content, files
from sdfastgn.plans.disk.key import key_of
from sdfastgn.plans.guard import Guard
from sdfastgn.plans.outcome import Outcome
from sdfastgn.plans.run.plan import Plan
from sdfastgn.plans.trace.traced import Traced


class Saved:
    """The file with the plan of one kind of call.

    ``key``: None if there is no file, because plans are not kept on disk, or because something in the model
    has content that no text tells.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._text: str | None = None

    @classmethod
    def of(cls, module: nn.Module, call: Any, device: Any, guard: Guard) -> Saved:
        """The file for the kind of call ``call`` of ``module`` in its present state."""
        return cls(None if files.folder() is None else key_of(module, call, device, guard))

    def load(self, module: nn.Module, tensors: Any, copy_of: Any = None) -> tuple[Plan, Outcome] | None:
        """The plan of the file and what its call returns; None if there is no such file, or a damaged one.

        ``copy_of``: as in ``Plan``.
        """
        text = None if self._key is None else files.load(self._key)
        if text is None:
            return None
        try:
            traced, graph, outcome = content.read(text, module, tensors)
            return Plan(traced, graph, copy_of), outcome
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the text is no plan
            files.remove(self._key)  # type: ignore[arg-type]
            return None

    def note(self, module: nn.Module, traced: Traced, graph: fx.Graph, outcome: Outcome) -> None:
        """Keep the text of a new plan until ``save`` writes it."""
        if self._key is not None:
            try:
                self._text = content.text_of(module, traced, graph, outcome)
            except content.Unwritable:
                self._text = None

    def save(self) -> None:
        """Write the plan that was noted. A plan that was loaded is in the file already."""
        if self._key is not None and self._text is not None:
            files.save(self._key, self._text)
