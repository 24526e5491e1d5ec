"""Fusions for what is no module: a scheduler, an image processor, the pipeline itself. Like ``ClassSwap``, for plain objects.

One instance gets a subclass of its class, which goes by the same name and module: ``save_pretrained`` writes these, and pipelines
look them up.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sfastgn.patches.upstream import unknown_source

__all__ = ["PipelinePart"]

_parts: dict[str, PipelinePart] = {}


@dataclass(frozen=True)
class PipelinePart:
    """A rule for one kind of object.

    Args:
        name: in reports.
        is_stock: true for an object that this is about and that has its stock class.
        overrides: of a stock class: the attributes of the subclass that takes its place.
        upstream: of a stock class: the class that defines what is replaced or relied upon, and the names of these methods and
            properties; their sources must be known.
        private: attribute that the subclass keeps in the instance; goes with ``undo``.
    """

    name: str
    is_stock: Callable[[Any], bool]
    overrides: Callable[[Any], dict[str, Any]]
    upstream: Callable[[type], tuple[type, tuple[str, ...]]]
    private: str = ""
    _classes: dict[type, type] = field(default_factory=dict)  # stock -> its subclass

    def __post_init__(self) -> None:
        _parts[self.name] = self

    def claims(self, part: object) -> bool:
        """True if this is about ``part``, changed or not."""
        return self.is_applied(part) or self.is_stock(part)

    def is_applied(self, part: object) -> bool:
        return type(part) in self._classes.values()

    def reason_to_skip(self, part: Any) -> str | None:
        """Why a claimed ``part`` that has its stock class must keep it, or None. Changes nothing."""
        owner, names = self.upstream(type(part))
        replaced = [name for name in names if name in vars(part)]
        if replaced:
            return f"other code replaced this instance's {replaced[0]}"
        return unknown_source(owner, *names)

    def apply(self, part: Any) -> None:
        part.__class__ = self._class_for(type(part))

    def undo(self, part: Any) -> None:
        """``part`` as it was; nothing to do on a stock one."""
        if self.is_applied(part):
            part.__class__ = type(part).__base__
            vars(part).pop(self.private, None)

    def _class_for(self, stock: Any) -> type:
        if stock not in self._classes:
            names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}

            def reduce_ex(part: Any, protocol: Any) -> tuple[Any, ...]:
                # For copies and pickles: under its own name the class would be taken for the stock one.
                make, arguments, *state = stock.__reduce_ex__(part, max(int(protocol), 2))
                is_plain = make is copyreg.__newobj__  # type: ignore[attr-defined]
                return (_new, (self.name, stock), *state) if is_plain else (make, arguments, *state)

            own = {**self.overrides(stock), "__reduce_ex__": reduce_ex}
            self._classes.setdefault(stock, type(stock.__name__, (stock,), {**names, **own}))
        return self._classes[stock]


def _new(name: str, stock: type) -> Any:
    cls: Any = _parts[name]._class_for(stock)
    return cls.__new__(cls)
