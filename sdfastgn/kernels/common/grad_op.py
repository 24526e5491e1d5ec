"""The op of a backward: the gradients that are wanted, by kernels or in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.op import Op

__all__ = ["GradOp"]

Gradients = TypeVar("Gradients", bound=tuple[Tensor | None, ...])


class GradOp(Op, Generic[Gradients]):
    """An op whose results are the gradients of another one.

    Its own derivative is that of the plain PyTorch form. What the arguments have from a forward
    (statistics) counts there as the function of x that it is, where that form computes it again.

    Args:
        schema: as in ``Op``; one tensor is returned for each gradient that is wanted, in their order.
        arguments: as in ``Op``, the gradients of the other op's results first; its ``wanted()`` tells
            for each gradient whether it is.
        gradients: a NamedTuple of the gradients, each None where it is not wanted.
        launch: ``arguments -> gradients`` by kernels, for valid arguments and an x that is not empty.
        reference: the same in plain PyTorch, every step a differentiable op.
        empty: the same without values; gradients that are not wanted may be there.
    """

    def __init__(
        self,
        schema: str,
        arguments: Any,
        gradients: Callable[..., Gradients],
        *,
        launch: Callable[[Any], Gradients],
        reference: Callable[[Any], Gradients],
        empty: Callable[[Any], tuple[Tensor | None, ...]],
    ) -> None:
        def fake(call: Any) -> list[Tensor]:
            found = zip(empty(call), call.wanted(), strict=True)
            return [grad for grad, want in found if want and grad is not None]

        @dispatch.retried
        def run(call: Any) -> list[Tensor]:
            if call.x.numel() == 0:
                return [grad.zero_() for grad in fake(call)]
            found = launch(call) if dispatch.runs_in_triton(call.x) else reference(call)
            return [grad for grad in found if grad is not None]

        super().__init__(schema, arguments, run, fake, save=_save_all, backward=_derivative_of(reference))
        self._launch, self._reference, self._gradients = launch, reference, gradients

    @dispatch.retried
    def __call__(self, call: Any) -> Gradients:
        """The gradients that are wanted: the cheapest way that is right for ``call``."""
        wanted = call.wanted()
        if not any(wanted):
            return self._gradients(*[None] * len(wanted))
        if any(dispatch.is_batched(t) for t in tuple(call)[:2] if t is not None):  # gradients stand first
            return self._reference(call)
        if call.x.numel() and dispatch.is_plain_inference(call.x, call):
            return self._launch(call)
        found = iter(self.through_dispatcher(call))
        return self._gradients(*(next(found) if want else None for want in wanted))


def _save_all(ctx: Any, call: Any, results: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.call = type(call)(*(None if isinstance(t, Tensor) else t for t in call))
    ctx.save_for_backward(*(t if isinstance(t, Tensor) else None for t in call))


def _derivative_of(
    gradients: Callable[[Any], tuple[Tensor | None, ...]],
) -> Callable[..., dict[str, Tensor | None]]:
    def backward(ctx: Any, needs: Any, dgrads: Any) -> dict[str, Tensor | None]:
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
