"""Recognizes three subclasses of ``nn.GroupNorm`` in other projects by the code of their ``forward``.

These are GroupNorm32, GroupNormAct and GroupNorm1Act. They cannot be recognized by their class objects.
GroupNorm32 is copied from repository to repository, so each repository has its own class of this name. timm,
which defines the other two, may not be installed.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch.nn.functional as F
from torch import nn

from sdfastgn.patches.swap.tested_sources import definition_of, hash_of

# GroupNorm32 of guided-diffusion and Latent Diffusion. It casts x to fp32, normalizes, and casts back.
CAST = "cast"
# timm's GroupNormAct and GroupNorm1Act. They normalize, then call their child ``drop``, then ``act``.
NORM_ACT = "norm_act"

# Hash of the code of a ``forward`` -> what this code does.
_KINDS = {
    "38ab40599b7fe8a5": CAST,  # a GroupNorm32 that casts its result with .type(x.dtype)
    "fb6dbc32c2bcda99": CAST,  # a GroupNorm32 that casts its result with .to(x.dtype)
    "2952c40abcaa8cd6": NORM_ACT,  # GroupNormAct and GroupNorm1Act of timm 0.9 to 1.0.31
}
# A ``forward`` -> the hash of its code. Classes cannot be the keys: a class may get another ``forward``.
_hashes: weakref.WeakKeyDictionary[types.FunctionType, str] = weakref.WeakKeyDictionary()


def known_base(cls: type) -> type[nn.Module] | None:
    """The first class among ``cls`` and its bases that ``kind_of`` recognizes; None if there is none."""
    if not issubclass(cls, nn.GroupNorm):
        return None
    return next((base for base in cls.__mro__ if kind_of(base) is not None), None)


def kind_of(cls: type) -> str | None:
    """Returns what the ``forward`` of ``cls`` does: ``CAST`` or ``NORM_ACT``.

    None if this ``forward`` is not known, or if ``cls`` is no direct subclass of ``nn.GroupNorm``.
    """
    forward = vars(cls).get("forward")
    if cls.__bases__ != (nn.GroupNorm,) or not isinstance(forward, types.FunctionType):
        return None
    kind = _KINDS.get(_hash(forward))
    # The hash does not tell which object a global name refers to. While ``_fast_norm`` is off, timm's code
    # uses only the global ``F``, so it must be ``torch.nn.functional``.
    return None if kind == NORM_ACT and forward.__globals__.get("F") is not F else kind


def _hash(forward: Any) -> str:
    if forward not in _hashes:
        definition = None if hasattr(forward, "__wrapped__") else definition_of(forward)
        _hashes[forward] = "" if definition is None else hash_of(definition)
    return _hashes[forward]
