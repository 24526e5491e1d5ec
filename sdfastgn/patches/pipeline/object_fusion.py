"""Fusions of plain objects, a scheduler or an image processor, as ``ClassSwap`` is for modules.

One instance gets a subclass of its class, which goes by the same name and module:
``save_pretrained`` writes these, and pipelines look them up. What is made by way of that subclass
(``type(pipe.scheduler).from_config(...)``) has the stock class.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sdfastgn.patches.core.tested_sources import TestedSource, unknown_source

__all__ = ["ObjectFusion"]

_MARK = "_sdfastgn_fusion"  # in the subclass: the name of its fusion


@dataclass(frozen=True)
class ObjectFusion:
    """A fusion of instances of exactly the classes in ``sources``, or of heirs too.

    Args:
        name: in reports.
        module: the module's ``__name__`` in which this is called ``FUSION``; copies and pickles
            look there.
        sources: the stock classes, with what is replaced or relied upon; it must be known.
        overrides: of a stock class: the attributes of the subclass that takes its place.
        heirs: also of classes that inherit everything that ``sources`` name.
    """

    name: str
    module: str
    sources: tuple[TestedSource, ...]
    overrides: Callable[[Any], dict[str, Any]]
    heirs: bool = False
    _class_of: dict[type, type] = field(default_factory=dict)  # stock class -> its subclass

    def claims(self, part: object) -> bool:
        """True if this is about ``part``, changed or not."""
        is_stock = self._source_of(type(part)) is not None
        return is_stock or self.is_applied(part) or self.is_over_applied(part)

    def is_applied(self, part: object) -> bool:
        return vars(type(part)).get(_MARK) == self.name

    def is_over_applied(self, part: object) -> bool:
        """True if other code has derived the class of ``part`` from ours."""
        return any(vars(base).get(_MARK) == self.name for base in type(part).__mro__[1:])

    def reason_to_skip(self, part: Any) -> str | None:
        """Why a claimed ``part`` that has its stock class must keep it, or None.

        Changes nothing.
        """
        if self.is_over_applied(part):
            return f"other code changed its class to {type(part).__module__}.{type(part).__qualname__}"
        source: Any = self._source_of(type(part))
        replaced = [name for name in source.methods if name in vars(part)]
        return f"other code replaced this instance's {replaced[0]}" if replaced else unknown_source(source)

    def apply(self, part: Any) -> None:
        part.__class__ = self._class_for(type(part))

    def undo(self, part: Any) -> None:
        """``part`` as it was; nothing to do on a stock one."""
        if self.is_applied(part):
            part.__class__ = type(part).__base__

    def _source_of(self, stock: type) -> TestedSource | None:
        return next(
            (source for source in self.sources if stock is source.cls or self._is_heir(stock, source)), None
        )

    def _is_heir(self, stock: type, source: TestedSource) -> bool:
        if not (self.heirs and issubclass(stock, source.cls)):
            return False
        return all(getattr(stock, name) is getattr(source.cls, name) for name in source.methods)

    def _class_for(self, stock: Any) -> type:
        if stock not in self._class_of:
            self._class_of[stock] = self._make_class(stock)
        return self._class_of[stock]

    def _make_class(self, stock: Any) -> type:
        @functools.wraps(stock.__init__)
        def init(part: Any, *args: Any, **kwargs: Any) -> None:
            stock.__init__(part, *args, **kwargs)
            self.undo(part)  # a new instance was not optimized

        def reduce_ex(part: Any, protocol: Any) -> Any:
            make, arguments, *state = stock.__reduce_ex__(part, max(int(protocol), 2))
            if not self.is_applied(part):  # a class derived from this one
                return (make, arguments, *state)
            # Under its own name the class would be taken for the stock one.
            return (_new, (self.module, stock), *state)

        names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        own = {**self.overrides(stock), "__init__": init, "__reduce_ex__": reduce_ex, _MARK: self.name}
        return type(stock.__name__, (stock,), {**names, **own})


def _new(module: str, stock: type) -> Any:
    """For copies and pickles: an instance without its state.

    A stock one where upstream is not what was tested.
    """
    fusion: ObjectFusion = importlib.import_module(module).FUSION
    source = fusion._source_of(stock)
    cls: Any = stock if source is None or unknown_source(source) else fusion._class_for(stock)
    return cls.__new__(cls)
