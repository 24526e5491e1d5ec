"""Makes objects that are not ``nn.Module``s faster, such as schedulers. (``ClassSwap`` is for modules.)

The class of a fused instance is a subclass of its class in diffusers, its *stock* class. The subclass has the
name and the Python module of the stock class, because ``save_pretrained`` writes both and pipelines look them
up. A new instance that is made with the subclass, as by ``type(pipe.scheduler).from_config(...)``, gets the
stock class.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sdfastgn.patches.swap.tested_sources import TestedSource, unknown_source

_MARK = "_sdfastgn_fusion"  # the attribute of a fused class that holds the name of the fusion


@dataclass(frozen=True)
class ObjectFusion:
    """A fusion that makes instances of the classes in ``sources`` faster, by changing their class.

    Args:
        name: the fusion's name in reports.
        module: the ``__name__`` of the Python module in which this fusion is called ``FUSION``. Copies and
            pickles find the fusion there.
        sources: the classes of diffusers, and their methods that the fusion replaces or relies on. An object
            is only fused if the installed code of these methods was tested for the object's class.
        overrides: called with a class of diffusers. Returns the attributes of the subclass that replaces it.
        heirs: True if instances of subclasses are fused too, provided that the subclasses inherit all methods
            in ``sources`` unchanged. False if only instances of the exact classes are fused.
    """

    name: str
    module: str
    sources: tuple[TestedSource, ...]
    overrides: Callable[[Any], dict[str, Any]]
    heirs: bool = False
    _class_of: dict[type, type] = field(default_factory=dict)  # class of diffusers -> its fused subclass

    def claims(self, part: object) -> bool:
        """True if ``sdfastgn.report`` lists ``part`` under this fusion: as fused, fusable, or skipped."""
        is_stock = self._source_of(type(part)) is not None
        return is_stock or self.is_applied(part) or self.is_over_applied(part)

    def is_applied(self, part: object) -> bool:
        return vars(type(part)).get(_MARK) == self.name

    def is_over_applied(self, part: object) -> bool:
        """True if other code has given ``part`` a class that it derived from the fused class."""
        return any(vars(base).get(_MARK) == self.name for base in type(part).__mro__[1:])

    def reason_to_skip(self, part: Any) -> str | None:
        """Why ``part`` cannot be fused; None if it can.

        This method is called only for parts that the fusion claims and that are not fused.
        """
        if self.is_over_applied(part):
            return f"other code changed its class to {type(part).__module__}.{type(part).__qualname__}"
        source: Any = self._source_of(type(part))
        replaced = [name for name in source.methods if name in vars(part)]
        return f"other code replaced this instance's {replaced[0]}" if replaced else unknown_source(source)

    def apply(self, part: Any) -> None:
        part.__class__ = self._class_for(type(part))

    def undo(self, part: Any) -> None:
        """Give ``part`` its original class again if it has the fused class; else do nothing."""
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
            self.undo(part)  # ``optimize`` was not called for a new instance: it gets the original class

        def reduce_ex(part: Any, protocol: Any) -> Any:
            make, arguments, *state = stock.__reduce_ex__(part, max(int(protocol), 2))
            # If other code has derived the class of ``part`` from the fused class, pickle can find this class
            # by its name, so the usual result of ``__reduce_ex__`` is right.
            if not self.is_applied(part):
                return (make, arguments, *state)
            # Pickle finds a class by its name. The fused class has the name of the original class, so pickle
            # would find the original class. Therefore pickle calls ``_new``, which finds the fused class.
            return (_new, (self.module, stock), *state)

        names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        own = {**self.overrides(stock), "__init__": init, "__reduce_ex__": reduce_ex, _MARK: self.name}
        return type(stock.__name__, (stock,), {**names, **own})


def _new(module: str, stock: type) -> Any:
    """Make an instance without attributes. Copy and pickle call this, and then set the attributes.

    The class is the fused one if the installed code of diffusers was tested. Otherwise it is diffusers' own.
    """
    fusion: ObjectFusion = importlib.import_module(module).FUSION
    source = fusion._source_of(stock)
    cls: Any = stock if source is None or unknown_source(source) else fusion._class_for(stock)
    return cls.__new__(cls)
