"""Fusions for what is no module: a scheduler, an image processor, the pipeline itself. Like ``ClassSwap``, for plain objects.

One instance gets a subclass of its class, which goes by the same name and module: ``save_pretrained`` writes these, and pipelines
look them up. What is made by way of that subclass (``type(pipe.scheduler).from_config(...)``) has the stock class.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sdfastgn.patches.core.tested_sources import unknown_source

__all__ = ["PipelinePart"]

_MARK = "_sdfastgn_part"  # in the subclass: the name of its rule
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
    """

    name: str
    is_stock: Callable[[Any], bool]
    overrides: Callable[[Any], dict[str, Any]]
    upstream: Callable[[type], tuple[type, tuple[str, ...]]]
    # Stock class -> its subclass; neither is kept alive, as classes are made in notebooks and functions too.
    _classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        _parts[self.name] = self

    def claims(self, part: object) -> bool:
        """True if this is about ``part``, changed or not."""
        return self.is_applied(part) or self.is_over_applied(part) or self.is_stock(part)

    def is_applied(self, part: object) -> bool:
        return vars(type(part)).get(_MARK) == self.name

    def is_over_applied(self, part: object) -> bool:
        """True if other code has derived the class of ``part`` from ours."""
        return any(vars(base).get(_MARK) == self.name for base in type(part).__mro__[1:])

    def reason_to_skip(self, part: Any) -> str | None:
        """Why a claimed ``part`` that has its stock class must keep it, or None. Changes nothing."""
        if self.is_over_applied(part):
            return f"other code changed its class to {type(part).__module__}.{type(part).__qualname__}"
        _, names = self.upstream(type(part))
        replaced = [name for name in names if name in vars(part)]
        if replaced:
            return f"other code replaced this instance's {replaced[0]}"
        if any("__init_subclass__" in vars(cls) for cls in type(part).__mro__[:-1]):
            return "its class wants to hear of subclasses"
        return self._unknown_source(type(part))

    def apply(self, part: Any) -> None:
        part.__class__ = self._class_for(type(part))

    def undo(self, part: Any) -> None:
        """``part`` as it was; nothing to do on a stock one."""
        if self.is_applied(part):
            part.__class__ = type(part).__base__

    def _unknown_source(self, stock: type) -> str | None:
        owner, names = self.upstream(stock)
        return unknown_source(owner, *names)

    def _class_for(self, stock: Any) -> type:
        reference = self._classes.get(stock)
        cls = None if reference is None else reference()
        if cls is None:
            cls = self._make_class(stock)
            self._classes[stock] = weakref.ref(cls)
        return cls

    def _make_class(self, stock: Any) -> type:
        @functools.wraps(stock.__init__)
        def init(part: Any, *args: Any, **kwargs: Any) -> None:
            stock.__init__(part, *args, **kwargs)
            self.undo(part)  # what is made anew was not optimised

        def reduce_ex(part: Any, protocol: Any) -> Any:
            if not self.is_applied(part):  # a class derived from this one
                return stock.__reduce_ex__(part, protocol)
            reduced = stock.__reduce_ex__(part, max(int(protocol), 2))
            if isinstance(reduced, str):
                return reduced
            make, arguments, *state = reduced
            # Under its own name the class would be taken for the stock one.
            if make is copyreg.__newobj__ and arguments == (type(part),):  # type: ignore[attr-defined]
                return (_new, (self.name, stock), *state)
            return (make, tuple(stock if a is type(part) else a for a in arguments), *state)

        names = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
        own = {**self.overrides(stock), "__init__": init, "__reduce_ex__": reduce_ex, _MARK: self.name}
        return type(stock.__name__, (stock,), {**names, **own})


def _new(name: str, stock: type) -> Any:
    """For copies and pickles: an instance without its state. A stock one where upstream is not what was tested."""
    importlib.import_module(
        "sdfastgn.patches.registry"
    )  # a process that only reads a pickle knows no rule yet
    part = _parts.get(name)
    cls: Any = stock if part is None or part._unknown_source(stock) else part._class_for(stock)
    return cls.__new__(cls)
