"""The derivative of a backward op: that of the plain PyTorch form which computes the same gradients.

Op(schema, arguments, run, fake, save=save_all, backward=derivative_of(reference))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["derivative_of", "save_all"]


def save_all(ctx: Any, call: Any, results: Any) -> None:
    """Keeps the arguments ``call`` of an op."""
    ctx.set_materialize_grads(False)
    ctx.call = type(call)(*(None if isinstance(t, Tensor) else t for t in call))
    ctx.save_for_backward(*(t if isinstance(t, Tensor) else None for t in call))


def derivative_of(
    gradients: Callable[[Any], Sequence[Tensor | None]],
) -> Callable[..., dict[str, Tensor | None]]:
    """The ``backward`` of an op that computes ``gradients(arguments)``, which is differentiable PyTorch.

    What the arguments have from a forward (statistics) counts as the function of x that it is, where
    ``gradients`` computes it again.
    """

    def backward(ctx: Any, needs: Any, dgrads: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        keep_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Aliases: dy itself may be a function of x, by a way that is not this op's to follow.
            call = type(ctx.call)(
                *(
                    value if t is None else t.view_as(t)
                    for value, t in zip(ctx.call, ctx.saved_tensors, strict=True)
                )
            )
            made = [g for g in gradients(call) if g is not None]
            pairs = [(g, d) for g, d in zip(made, dgrads, strict=True) if d is not None and g.requires_grad]
        wanted = [name for name, need in zip(call._fields, needs, strict=True) if need is True]
        if not pairs or not wanted:
            return {}
        outputs, along = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            outputs,
            [getattr(call, name) for name in wanted],
            along,
            create_graph=keep_graph,
            allow_unused=True,
        )
        return dict(zip(wanted, found, strict=True))

    return backward
