"""Finds *wrappers*: layers of peft, in which are a layer of the model and the small layers of its adapters.

Only wrappers for LoRA around a linear layer or 2-D convolution are found here. ``peft_layers.py`` has a
subclass of peft's class for each of the two, which sdfastgn gives to wrappers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

# The Python module in which peft defines its wrappers for LoRA.
PEFT = "peft.tuners.lora.layer"

# peft's class -> its subclass, and all subclasses. Empty until ``peft_layers.py`` is imported.
_subclasses: dict[type[nn.Module], type[nn.Module]] = {}
_own: set[type[nn.Module]] = set()


def know(subclasses: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Record the classes of ``peft_layers.py``, which calls this when it is imported."""
    _subclasses.update(subclasses)
    _own.update(subclasses.values())


def subclasses() -> Mapping[type[nn.Module], type[nn.Module]]:
    """peft's class -> its subclass. Empty until other code has imported peft's layers."""
    if not _subclasses and PEFT in sys.modules:
        importlib.import_module("sdfastgn.patches.lora.peft_layers")  # which imports this file
    return _subclasses


def has_subclass(layer: Any) -> bool:
    """True if ``layer`` is a wrapper to which sdfastgn has given a class of ``peft_layers.py``."""
    return type(layer) in _own


def is_wrapper(layer: Any) -> bool:
    """True if ``layer`` is a wrapper. Its class is peft's, or the subclass that sdfastgn gave it."""
    kind = type(layer)
    return kind in _own or (kind.__module__ == PEFT and kind.__qualname__ in ("Linear", "Conv2d"))


def wrapped_layer(layer: Any) -> Any:
    """The layer inside of ``layer``, if ``layer`` is a wrapper; else ``layer`` itself."""
    return layer._modules["base_layer"] if is_wrapper(layer) else layer
