"""Finds *wrappers*: layers of peft that contain a layer of the model, and the small layers of its adapters.

Only wrappers for LoRA around a linear layer or 2-D convolution are found here. For each of these two,
``peft_layers.py`` has a subclass of peft's class. sdfastgn changes the class of wrappers to these subclasses.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

# The Python module in which peft defines its LoRA layers.
PEFT = "peft.tuners.lora.layer"

# A dict from peft's LoRA classes to sdfastgn's subclasses of them, and the set of these subclasses. Both are
# empty until ``peft_layers.py`` is imported.
_subclasses: dict[type[nn.Module], type[nn.Module]] = {}
_own: set[type[nn.Module]] = set()


def know(subclasses: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Record sdfastgn's subclasses of peft's LoRA layers.

    ``peft_layers.py`` calls this when it is imported.
    """
    _subclasses.update(subclasses)
    _own.update(subclasses.values())


def subclasses() -> Mapping[type[nn.Module], type[nn.Module]]:
    """A dict from peft's LoRA classes to sdfastgn's subclasses of them.

    Empty until other code has imported peft's layers.
    """
    if not _subclasses and PEFT in sys.modules:
        # ``peft_layers`` is not imported at the top, because it imports this file and peft.
        importlib.import_module("sdfastgn.patches.lora.peft_layers")
    return _subclasses


def has_subclass(layer: Any) -> bool:
    """True if ``layer`` is peft's LoRA layer, and sdfastgn has changed its class to a subclass."""
    return type(layer) in _own


def is_wrapper(layer: Any) -> bool:
    """True if ``layer`` is peft's LoRA layer around a linear layer or 2-D convolution.

    Its class may be peft's, or the subclass that sdfastgn has given it.
    """
    kind = type(layer)
    return kind in _own or (kind.__module__ == PEFT and kind.__qualname__ in ("Linear", "Conv2d"))


def wrapped_layer(layer: Any) -> Any:
    """The model's own layer inside ``layer`` if ``layer`` is peft's LoRA layer; else ``layer`` itself."""
    return layer._modules["base_layer"] if is_wrapper(layer) else layer
