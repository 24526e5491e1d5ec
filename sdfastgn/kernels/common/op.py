"""What an op of this package is: one declaration for PyTorch's dispatcher, and the cheap ways around it.

``torch.compile``, export, fake tensors and autograd know an op by its registration (ADR 2). A plain
call has no use for the dispatcher, which costs more CPU time than a small kernel takes on the GPU:

- plain inference launches;
- plain training launches inside an ``autograd.Function``, at a fifth of the registered autograd's cost;
- every other call goes through the dispatcher, or runs in PyTorch's own ops where no kernel can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdfastgn.kernels._ops import add_op_namespace_prefix, ops
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.declaration import (
    arguments_of,
    checks_of,
    differentiable,
    fields_of,
    passed_on,
    schema_of,
)
from sdfastgn.kernels.common.plan_cache import Plans, SavingPlan, picker

_LIBRARY = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "FRAGMENT")


class Op:
    """The op ``sdfastgn::<name>`` for CPU and CUDA tensors.

    Args:
        name: as in ``torch.ops.sdfastgn``.
        arguments: the declaration of its arguments (``common/declaration.py``).
        results: what it returns, as in a schema: ``"(Tensor, Tensor)"``.
        run: ``arguments -> results``.
        fake: the same for tensors without data: shapes, strides and dtypes.
        save: ``(ctx, arguments, results)`` keeps what ``backward`` takes.
        backward: ``(ctx, needs, *gradients of the results) -> gradients by argument``. ``needs`` are
            arguments too, each True where its gradient is wanted. None: the op has no gradient.
        hidden: number of trailing results that only the backward uses.
    """

    def __init__(
        self,
        name: str,
        arguments: Any,
        results: str,
        *,
        run: Callable[[Any], Any],
        fake: Callable[[Any], Any],
        save: Callable[[Any, Any, Any], None] = lambda ctx, call, results: None,
        backward: Callable[..., dict[str, Tensor | None]] | None = None,
        hidden: int = 0,
    ) -> None:
        self.name, self.arguments, self.save = f"sdfastgn.{name}", arguments, save
        self._backward: Any = backward
        _LIBRARY.define(schema_of(name, arguments, results))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, lambda *args: run(arguments(*args)), device)
        qualified = add_op_namespace_prefix(name)
        torch.library.register_fake(qualified, lambda *args: fake(arguments(*args)), lib=_LIBRARY)
        if backward is not None:
            torch.library.register_autograd(
                qualified,
                lambda ctx, *grads: self.gradients(ctx, arguments._fields[: self._count], grads),
                setup_context=self._save_registered,
                lib=_LIBRARY,
            )
        self._hidden = hidden
        self._registered = getattr(ops, name).default
        self._count = len(arguments_of(arguments))

    def through_dispatcher(self, call: Any) -> Any:
        """The results for ``call``, an instance of ``arguments``."""
        # torch.compile of PyTorch 2.8 slices no NamedTuple.
        return self._registered(*tuple(call)[: self._count])

    def _save_registered(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if self._hidden:
            ctx.mark_non_differentiable(*output[-self._hidden :])
        self.save(ctx, self.arguments(*inputs), output)

    def returned(self, results: Any) -> Any:
        """What the caller gets of the op's results."""
        if not self._hidden:
            return results
        shown = results[: -self._hidden]
        return shown[0] if len(shown) == 1 else shown

    def gradients(self, ctx: Any, names: tuple[str, ...], grads: Any) -> tuple[Tensor | None, ...]:
        """The gradients of the arguments ``names``, which are those that autograd asks about."""
        # Compiled autograd of PyTorch 2.8 traces this: of a NamedTuple it knows the fields, and no
        # ``_replace``, ``_make``, ``_asdict``, slice or property.
        asked = dict(zip(names, ctx.needs_input_grad, strict=False))
        needs = self.arguments(*[asked.get(name, False) for name in self.arguments._fields])
        return tuple(map(self._backward(ctx, needs, *grads).get, names))


class PlannedOp(Op):
    """An op that is launched by a plan.

    Args:
        name, arguments, fake: as in ``Op``.
        results: their names.
        saved: names of further results, which only the backward uses.
        plan: ``arguments without gaps -> SavingPlan``.
        reference: ``arguments -> results`` in plain PyTorch.
        backward: as in ``Op``. Or the ``GradOp`` whose arguments are ``backward_of`` this op's, which
            then says what is saved.
        save: as in ``Op``, where ``backward`` is no ``GradOp``.
        check: ``(public name, arguments)``, raises where an argument is wrong in a way that the
            declaration does not know. It runs when the first operand is known to be right.
        plain: ``arguments -> what the caller gets``, where PyTorch's own autograd sees every step.
            None: what it gets of ``reference``.
    """

    def __init__(
        self,
        name: str,
        arguments: Any,
        results: tuple[str, ...],
        saved: tuple[str, ...] = (),
        *,
        plan: Callable[[Any], SavingPlan],
        reference: Callable[[Any], Any],
        fake: Callable[[Any], Any],
        backward: Any,
        save: Callable[[Any, Any, Any], None] | None = None,
        check: Callable[[str, Any], None] = lambda name, call: None,
        plain: Callable[[Any], Any] | None = None,
    ) -> None:
        self.plans = Plans(arguments, plan)

        @dispatch.retried
        def run(call: Any) -> Any:
            if call[0].numel() == 0:
                results = fake(call)
                for result in (results,) if isinstance(results, Tensor) else results:
                    result.zero_()
                return results
            if dispatch.runs_in_triton(call[0]):
                return self.plans.of(call).run_and_save(call)
            return reference(call)

        if save is None:
            save, backward = _save_for(arguments, len(saved)), _backward_by(backward, arguments)
        kinds = ["Tensor"] * (len(results) + len(saved))
        super().__init__(
            name, arguments, kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})",
            run=run, fake=fake, save=save, backward=backward, hidden=len(saved),
        )  # fmt: skip
        self.check = checks_of(arguments, check)
        names = self.plans.tensors(arguments._fields)
        self._train = _training_function(self, names).apply
        self._plain = plain or (lambda call: self.returned(reference(call)))

    def __call__(self, call: Any, name: str | None = None) -> Any:
        """What the public function ``name`` returns: the cheapest way that is right for ``call``."""
        x = call[0]
        if dispatch.is_plain(x, call):
            plans = self.plans
            tensors = plans.tensors(call)
            trains = torch.is_grad_enabled() and dispatch.wants_gradient(x, tensors)
            try:
                # Invalid arguments never have a plan, so only calls of a new kind are checked.
                plan = plans.made.get(plans.key(call, tensors, trains))
                if plan is None:
                    self.check(name or self.name, call)
                    plan = plans.of(call, trains) if x.numel() else None
                if plan is not None:
                    return self._train(*tensors, call, plan) if trains else plan.run(call)
            except dispatch.KernelError:
                return self(call, name)
            # A number for a tensor; a tensor without strides or memory; a value without a hash.
            except (AttributeError, RuntimeError, TypeError):
                self.check(name or self.name, call)
                raise
        self.check(name or self.name, call)
        if not dispatch.needs_op(x):
            return self._plain(call)
        return self.returned(self.through_dispatcher(call))


def _save_for(arguments: Any, saved: int) -> Callable[[Any, Any, Any], None]:
    """Keeps the first operand, the last ``saved`` results, the other operands and the values: what the
    arguments of ``backward_of`` are, in their order.
    """
    first, *operands = (arguments._fields.index(name) for name in differentiable(arguments))
    picked = picker(operands)
    values = picker([arguments._fields.index(name) for name in passed_on(arguments)])

    def save(ctx: Any, call: Any, results: Any) -> None:
        ctx.set_materialize_grads(False)
        kept = results[len(results) - saved :] if saved else ()
        ctx.save_for_backward(call[first], *kept, *picked(call))
        ctx.values = values(call)

    return save


def _backward_by(grad_op: Any, arguments: Any) -> Callable[..., dict[str, Tensor | None]]:
    """The ``backward`` that calls ``grad_op`` with what ``_save_for`` kept."""
    names = differentiable(arguments)
    by_dtype = fields_of(grad_op.arguments)[-1].kind == "ScalarType?"

    def backward(ctx: Any, needs: Any, dy: Tensor | None, *_: None) -> dict[str, Tensor | None]:
        if dy is None:
            return {}
        saved = ctx.saved_tensors
        wanted = [getattr(needs, name) for name in names]
        if by_dtype:
            operands = (saved[0], *saved[len(saved) - len(names) + 1 :])
            wanted = [t.dtype if want else None for t, want in zip(operands, wanted, strict=True)]
        return grad_op(grad_op.arguments(dy, *saved, *ctx.values, *wanted))

    return backward


def _training_function(op: PlannedOp, names: tuple[str, ...]) -> Any:
    class Training(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            """``inputs``: the tensors, for autograd to see; all arguments; and their plan."""
            call, plan = inputs[-2:]
            results = plan.run_and_save(call)
            op.save(ctx, call, results)
            return op.returned(results)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return *op.gradients(ctx, names, grads), None, None

    # Profiles and anomaly mode show the name.
    return type(op.name.replace(".", "_"), (Training,), {})
