"""``Saved`` is the file on disk with one plan. A plan is a traced call, rewritten to kernels."""

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
    """Loads and saves the file that has the plan for one key.

    ``key``: the hash that names the file. None if there can be no file: plans are not kept on disk, or
    something in the model has content that no text can describe.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._text: str | None = None

    @classmethod
    def of(cls, module: nn.Module, call: Any, device: Any, guard: Guard) -> Saved:
        """Finds the file for a call of ``module`` in its present state. ``call`` describes the arguments."""
        return cls(None if files.folder() is None else key_of(module, call, device, guard))

    def load(self, module: nn.Module, tensors: Any, copy_of: Any = None) -> tuple[Plan, Outcome] | None:
        """Loads the plan, and the structure of its call's result. None if there is no file, or a damaged one.

        ``tensors``: all tensors among the call's arguments. ``copy_of``: as in ``Plan``, finds the copy of a
        weight in E4M3.
        """
        text = None if self._key is None else files.load(self._key)
        if text is None:
            return None
        try:
            traced, graph, outcome = content.read(text, module, tensors)
            return Plan(traced, graph, copy_of), outcome
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the file is removed, because its text describes no plan of this model
            files.remove(self._key)  # type: ignore[arg-type]
            return None

    def note(self, module: nn.Module, traced: Traced, graph: fx.Graph, outcome: Outcome) -> None:
        """Keep the text of a new plan in memory until ``save`` writes it to the file."""
        if self._key is not None:
            try:
                self._text = content.text_of(module, traced, graph, outcome)
            except content.Unwritable:
                self._text = None

    def save(self) -> None:
        """Write to the file the plan that ``note`` was called with. Does nothing if there is none."""
        if self._key is not None and self._text is not None:
            files.save(self._key, self._text)
