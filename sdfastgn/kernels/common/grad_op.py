"""The class of ops that compute gradients of other ops, such as ``sdfastgn::group_norm_backward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.declaration import (
    Gradients,
    empty_gradients,
    fields_of,
    gradients_of,
    without_gaps,
)
from sdfastgn.kernels.common.op import Op
from sdfastgn.kernels.common.plan_cache import Plan, Plans


class GradOp(Op):
    """An op that computes the gradients of another op. It returns one tensor for each wanted gradient.

    A ``GradOp`` can be differentiated again: autograd then differentiates ``reference``. Tensors that the
    forward saved, such as the mean, depend on x. ``reference`` must compute these tensors from x again and
    not use the saved ones, so that its derivative includes this dependence.

    Args:
        name: the op's name in ``torch.ops.sdfastgn``.
        arguments: the declaration of the op's arguments, a NamedTuple class that ``backward_of`` usually
            makes. Its fields are the gradients of the other op's results, x, further arguments, and which
            gradients are wanted (``Wanted`` or ``WantedDtype``).
        plan: function ``call -> Plan``. ``call`` is an instance of ``arguments``, whose tensors have layouts
            that kernels can read (``declaration.without_gaps``). The plan's method ``run`` launches the
            kernels and returns {operand's name: gradient}.
        reference: function ``call -> {operand's name: gradient}`` in plain PyTorch. Autograd must be able to
            differentiate each of its ops.
        empty: function ``(call, names) -> {operand's name: gradient}``. It allocates uninitialized memory for
            the gradients of the operands ``names``. In ``call``, only x is sure to have a layout that kernels
            can read.
    """

    def __init__(
        self,
        name: str,
        arguments: Any,
        *,
        plan: Callable[[Any], Plan],
        reference: Callable[[Any], Gradients],
        empty: Callable[[Any, tuple[str, ...]], Gradients] = empty_gradients,
    ) -> None:
        names = gradients_of(arguments)

        def fake(call: Any) -> list[Tensor]:
            wanted = tuple(name for name, want in zip(names, self._wanted(call), strict=True) if want)
            # Only x is checked for gaps in memory, because torch.compile adds a guard for each check of
            # strides.
            return _in_order(empty(without_gaps(call, x_alone), wanted), names)

        def run(call: Any) -> list[Tensor]:
            if call.x.numel() == 0:
                return [grad.zero_() for grad in fake(call)]
            found = self._compute(call) if dispatch.runs_in_triton(call.x) else reference(call)
            return _in_order(found, names)

        self._names, self._reference, self.plans = names, reference, Plans(name, arguments, plan)
        # Number of arguments before x. These arguments are the gradients of the results of the op that is
        # differentiated.
        self._results = arguments._fields.index("x")
        x = fields_of(arguments)[self._results]
        x_alone = ((x.place, x.note.whole),)
        super().__init__(
            name, arguments, "Tensor[]",
            run=run, fake=fake, save=_save_all, backward=_derivative_of(reference, names),
        )  # fmt: skip

    def _wanted(self, call: Any) -> tuple[Any, ...]:
        return tuple(call)[-len(self._names) :]

    def _compute(self, call: Any) -> Any:
        """Computes the gradients by kernels, or in plain PyTorch if the kernels cannot be compiled."""
        try:
            return self.plans.of(call).run(call)
        except dispatch.KernelError as error:
            self.plans.turn_off(call, error)
            return self._reference(call)

    def __call__(self, call: Any) -> Any:
        """Computes the wanted gradients, and returns {operand's name: gradient}.

        A call on ordinary tensors that nothing traces, transforms or records for autograd launches kernels
        directly. A call with a batch of gradients (``is_grads_batched``) runs ``reference`` in plain PyTorch.
        All other calls go through PyTorch's dispatcher.
        """
        wanted = self._wanted(call)
        if not any(wanted):
            return {}
        if any(dispatch.is_batched(t) for t in tuple(call)[: self._results] if t is not None):
            return self._reference(call)
        if call.x.numel() and dispatch.is_plain_inference(call.x, call):
            return self._compute(call)
        found = iter(self.through_dispatcher(call))
        return {name: next(found) for name, want in zip(self._names, wanted, strict=True) if want}


def _in_order(found: Gradients, names: tuple[str, ...]) -> list[Tensor]:
    """Returns the gradients that are not None, in the order of the operands ``names``."""
    grads = [found.get(name) for name in names]
    return [grad for grad in grads if grad is not None]


def _save_all(ctx: Any, call: Any, results: Any) -> None:
    """Keeps all arguments for the backward: tensors by ``save_for_backward``, others in ``ctx.call``."""
    ctx.set_materialize_grads(False)
    ctx.call = type(call)(*(None if isinstance(t, Tensor) else t for t in call))
    ctx.save_for_backward(*(t if isinstance(t, Tensor) else None for t in call))


def _derivative_of(
    reference: Callable[[Any], Gradients], gradients: tuple[str, ...]
) -> Callable[..., dict[str, Tensor | None]]:
    """Returns the function ``backward`` of a ``GradOp``, an op that itself computes gradients.

    The function ``backward`` runs ``reference`` under autograd, and differentiates the results.
    ``gradients``: names of the operands whose gradients ``reference`` computes.
    """

    def backward(ctx: Any, needs: Any, dgrads: Any) -> dict[str, Tensor | None]:
        keep_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Differentiate with respect to views of the arguments, not to the arguments. If dy was computed
            # from x, the derivative with respect to x itself would include that computation.
            call = type(ctx.call)(
                *(
                    value if t is None else t.view_as(t)
                    for value, t in zip(ctx.call, ctx.saved_tensors, strict=True)
                )
            )
            found = reference(call)
            made = _in_order(found, gradients)
            pairs = [(g, d) for g, d in zip(made, dgrads, strict=True) if d is not None and g.requires_grad]
        wanted = [name for name, need in zip(call._fields, needs, strict=True) if need is True]
        if not pairs or not wanted:
            return {}
        outputs, along = zip(*pairs, strict=True)
        operands = [getattr(call, name) for name in wanted]
        derivatives = torch.autograd.grad(
            outputs, operands, along, create_graph=keep_graph, allow_unused=True
        )
        return dict(zip(wanted, derivatives, strict=True))

    return backward
