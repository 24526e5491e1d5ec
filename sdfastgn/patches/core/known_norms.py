"""Subclasses of ``nn.GroupNorm`` in other projects, recognized by the code of their ``forward``.

GroupNorm32 is copied from repository to repository, and timm may not be installed. So there is no class that
could be imported and compared with.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch.nn.functional as F
from torch import nn

from sdfastgn.patches.core.tested_sources import definition_of, hash_of

__all__ = ["CAST", "NORM_ACT", "kind_of", "known_base"]

# GroupNorm32 of guided-diffusion and Latent Diffusion: the norm of x in fp32, cast back.
CAST = "cast"
# timm's GroupNormAct and GroupNorm1Act: the norm, then ``drop``, then ``act``.
NORM_ACT = "norm_act"

_KINDS = {
    "38ab40599b7fe8a5": CAST,  # .type(x.dtype)
    "fb6dbc32c2bcda99": CAST,  # .to(x.dtype)
    "2952c40abcaa8cd6": NORM_ACT,  # timm 0.9 to 1.0.31
}
# ``forward`` -> its hash. The key is not the class, which may get another ``forward``.
_hashes: weakref.WeakKeyDictionary[types.FunctionType, str] = weakref.WeakKeyDictionary()


def known_base(cls: type) -> type[nn.Module] | None:
    """The class with a known ``forward``: ``cls`` itself or one of its bases; None if there is none."""
    if not issubclass(cls, nn.GroupNorm):
        return None
    return next((base for base in cls.__mro__ if kind_of(base) is not None), None)


def kind_of(cls: type) -> str | None:
    """``CAST`` or ``NORM_ACT`` for a direct subclass of ``nn.GroupNorm`` with that ``forward``."""
    forward = vars(cls).get("forward")
    if cls.__bases__ != (nn.GroupNorm,) or not isinstance(forward, types.FunctionType):
        return None
    kind = _KINDS.get(_hash(forward))
    # The hash does not cover the globals that the code uses. While ``_fast_norm`` is off, timm's code uses
    # one, ``F``: it must be PyTorch's.
    return None if kind == NORM_ACT and forward.__globals__.get("F") is not F else kind


def _hash(forward: Any) -> str:
    if forward not in _hashes:
        definition = None if hasattr(forward, "__wrapped__") else definition_of(forward)
        _hashes[forward] = "" if definition is None else hash_of(definition)
    return _hashes[forward]
