"""Fuses known subclasses of ``nn.GroupNorm``: GroupNorm32, which casts to fp32, and timm's GroupNormAct.

When the first instance of such a class is optimized, a fused subclass of the class is made. So a fused module
is still an instance of its original class.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from sdfastgn.kernels.common import dispatch
from sdfastgn.patches.layers.group_norm import FusedGroupNorm
from sdfastgn.patches.layers.known_norms import CAST, NORM_ACT, kind_of, known_base
from sdfastgn.patches.swap.class_forward import change_class
from sdfastgn.patches.swap.fusion import (
    activation_of,
    foreign_class,
    foreign_override,
    is_unhooked,
    register_fused,
    restore_class,
    stock_class,
)
from sdfastgn.patches.swap.tested_sources import TestedSource


class _MadeLater(FusedGroupNorm):
    """Base class of the fused classes. It makes their instances picklable.

    The fused classes are made at run time, so unpickling cannot find them by name. A pickle of a fused module
    contains the original class instead, and unpickling makes the fused class again.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        make, args, *state = reduced
        stock = stock_class(self)
        return (make, args, *state) if stock is type(self) else (_new, (stock,), *state)


class FusedGroupNorm32(_MadeLater):
    """GroupNorm32 on sdfastgn's kernel, which computes in fp32 and rounds once.

    The input and the result have the shape (N, C, *spatial) and the same dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def _fused(self, x: Tensor, activation: str, **operands: Any) -> Tensor:
        # Under autocast the kernel returns fp32, but GroupNorm32 returns the dtype of x.
        return super()._fused(x, activation, **operands).to(x.dtype)

    def _in_pytorch(self, input: Tensor) -> Tensor:
        # Weights are in fp64 if sdfastgn's function ``verify`` computes a reference. Then x is not cast to
        # fp32 as the original forward does, because PyTorch's norm needs x and weights of one dtype.
        is_wide = self.weight is not None and self.weight.dtype is torch.float64
        return super()._in_pytorch(input if is_wide else input.float()).to(input.dtype)


class FusedGroupNormAct(_MadeLater):
    """Computes norm and activation of timm's ``GroupNormAct`` in one kernel.

    timm calls the module ``drop`` between norm and activation. If ``drop`` is not an Identity, all three run
    one by one.

    The input and the result have the shape (N, C, *spatial).
    """

    drop: nn.Module
    act: nn.Module
    _fast_norm: bool

    def forward(self, x: Tensor) -> Tensor:
        if self._fast_norm:
            # ``super(FusedGroupNorm, self)`` finds timm's ``forward``. A plain ``super()`` would find the
            # ``forward`` of FusedGroupNorm.
            return super(FusedGroupNorm, self).forward(x)
        name = activation_of(self.act)
        drops = type(self.drop) is not nn.Identity or not is_unhooked(self.drop)
        if name is None or drops or not (is_unhooked(self.act) and dispatch.has_kernels(x)):
            return self.act(self.drop(super().forward(x)))
        return self._fused(x, name)


_FUSED: dict[str, type[FusedGroupNorm]] = {CAST: FusedGroupNorm32, NORM_ACT: FusedGroupNormAct}
# Original class -> its fused subclass.
_made: dict[type[nn.Module], type[nn.Module]] = {}


def _fused_class(stock: type[nn.Module]) -> type[nn.Module]:
    """The fused subclass of ``stock``, or ``stock`` itself if its ``forward`` is not known."""
    kind = kind_of(stock)
    if kind is None:
        return stock
    if stock not in _made:
        names = {"__module__": __name__, "__qualname__": f"Fused{stock.__qualname__}"}
        fused: Any = types.new_class(
            stock.__name__, (_FUSED[kind], stock), exec_body=lambda body: body.update(names)
        )
        register_fused(fused, stock)
        if kind == CAST:
            fused.norm_alone = fused
        _made[stock] = fused
    return _made[stock]


def _new(stock: type[nn.Module]) -> Any:
    cls: Any = _fused_class(stock)
    return cls.__new__(cls)


class SubclassSwap:
    """A fusion that gives modules of known subclasses of GroupNorm a fused class.

    Unlike ``ClassSwap``, which compares class objects, this fusion recognizes classes by the code of their
    ``forward``, because many projects have a copy of GroupNorm32, and timm may not be installed.
    """

    name = "group_norm_subclass"
    # The names of methods of diffusers whose installed code must be of a tested version: none. The subclasses
    # of GroupNorm are in other packages, and ``known_norms.py`` checks their code.
    sources: tuple[TestedSource, ...] = ()

    def claims(self, module: nn.Module) -> bool:
        return self.is_applied(module) or known_base(type(module)) is not None

    def is_applied(self, module: nn.Module) -> bool:
        return type(module) in _made.values()

    def reason_to_skip(self, module: nn.Module) -> str | None:
        base: Any = known_base(type(module))
        reason = foreign_class(module, base) or foreign_override(module)
        if reason is None and getattr(module, "_fast_norm", False):
            return "timm's fast norm is on, which computes in autocast's dtype"
        return reason

    def apply(self, module: nn.Module) -> None:
        change_class(module, _fused_class(type(module)))

    def undo(self, module: nn.Module) -> None:
        restore_class(module)


FUSION = SubclassSwap()
