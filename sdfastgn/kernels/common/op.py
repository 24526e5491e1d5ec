"""The classes of this package's ops: their registration, and the ways to call one without the dispatcher.

``torch.compile``, export, fake tensors and autograd need the registration (ADR 2). Plain calls
(``dispatch.is_plain``) do not. They skip the dispatcher, because it takes more CPU time than a small kernel
takes on the GPU:

- plain inference launches the kernels directly;
- plain training launches them inside an ``autograd.Function``, which takes a fifth of the CPU time of the
  registered autograd;
- every other call goes through the dispatcher, or runs in PyTorch's own ops where no kernel can run.
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
    """The registered op ``sdfastgn::<name>`` for CPU and CUDA tensors.

    Args:
        name: its name in ``torch.ops.sdfastgn``.
        arguments: the declaration of its arguments (``common/declaration.py``).
        results: the results' part of its schema, such as ``"(Tensor, Tensor)"``.
        run: ``arguments -> results``.
        fake: ``arguments -> results`` for tensors without data: computes only shapes, strides and dtypes.
        save: ``(ctx, arguments, results)``, stores in ``ctx`` what ``backward`` needs.
        backward: ``(ctx, needs, *gradients of the results) -> {argument's name: gradient}``. ``needs`` is an
            instance of ``arguments`` that has True where a gradient is wanted. If ``backward`` is None, the
            op has no gradients.
        hidden: number of results at the end that only the backward uses.
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
        """All results for ``call``, an instance of ``arguments``."""
        # torch.compile of PyTorch 2.8 cannot slice a NamedTuple.
        return self._registered(*tuple(call)[: self._count])

    def _save_registered(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if self._hidden:
            ctx.mark_non_differentiable(*output[-self._hidden :])
        self.save(ctx, self.arguments(*inputs), output)

    def returned(self, results: Any) -> Any:
        """The results without the hidden ones: a tensor if only one is left, else a tuple."""
        if not self._hidden:
            return results
        shown = results[: -self._hidden]
        return shown[0] if len(shown) == 1 else shown

    def gradients(self, ctx: Any, names: tuple[str, ...], grads: Any) -> tuple[Tensor | None, ...]:
        """The gradients of the arguments ``names``, in their order.

        ``names`` are the arguments that were passed to autograd, as in ``ctx.needs_input_grad``. ``grads``
        are the gradients of the results.
        """
        # Compiled autograd of PyTorch 2.8 traces this code. It supports the fields of a NamedTuple, but not
        # ``_replace``, ``_make``, ``_asdict``, slices or properties.
        asked = dict(zip(names, ctx.needs_input_grad, strict=False))
        needs = self.arguments(*[asked.get(name, False) for name in self.arguments._fields])
        return tuple(map(self._backward(ctx, needs, *grads).get, names))


class PlannedOp(Op):
    """An op whose kernels are launched by plans (``common/plan_cache.py``).

    Args:
        name, arguments, fake: as in ``Op``.
        results: names of the results that the caller gets.
        saved: names of the further results, which only the backward uses.
        plan: ``arguments without gaps -> SavingPlan``.
        reference: ``arguments -> results and saved results`` in plain PyTorch.
        backward: the ``GradOp`` with the arguments ``backward_of(arguments, saved, ...)``. Or a function as
            in ``Op``, which needs ``save``.
        save: as in ``Op``. None if ``backward`` is a ``GradOp``.
        check: ``(public name, arguments)``, raises if an argument is wrong in a way that the declaration does
            not express. It is called after the check of the first operand.
        plain: ``arguments -> what the caller gets`` in PyTorch's own differentiable ops. It runs where the
            registered op cannot. If it is None, ``reference`` runs there, and its saved results are dropped.
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
        """The results of the public function ``name``, by the fastest way that is valid for ``call``.

        Raises what the checks of the declaration and ``check`` raise. Their errors begin with ``name``.
        """
        x = call[0]
        if dispatch.is_plain(x, call):
            plans = self.plans
            tensors = plans.tensors(call)
            trains = torch.is_grad_enabled() and dispatch.wants_gradient(x, tensors)
            try:
                # Calls with invalid arguments never have a plan. So only calls without a plan are checked.
                plan = plans.made.get(plans.key(call, tensors, trains))
                if plan is None:
                    self.check(name or self.name, call)
                    plan = plans.of(call, trains) if x.numel() else None
                if plan is not None:
                    return self._train(*tensors, call, plan) if trains else plan.run(call)
            except dispatch.KernelError:
                return self(call, name)
            # Invalid arguments can fail before the check: a number in place of a tensor, a tensor without
            # strides or memory, a value without a hash. The check then raises an error that says so.
            except (AttributeError, RuntimeError, TypeError):
                self.check(name or self.name, call)
                raise
        self.check(name or self.name, call)
        if not dispatch.needs_op(x):
            return self._plain(call)
        return self.returned(self.through_dispatcher(call))


def _save_for(arguments: Any, saved: int) -> Callable[[Any, Any, Any], None]:
    """A ``save`` that keeps what ``_backward_by`` needs, in the order of ``backward_of``.

    It keeps the first operand, the last ``saved`` results, the other operands that may have a gradient,
    and the values.
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
    """A ``backward`` that calls ``grad_op`` with dy, what ``_save_for`` kept, and the wanted gradients."""
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
    """The ``autograd.Function`` of plain training. ``names`` are the arguments that are tensors."""

    class Training(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            """``inputs``: the tensors, as arguments that autograd sees, then the call, then its plan."""
            call, plan = inputs[-2:]
            results = plan.run_and_save(call)
            op.save(ctx, call, results)
            return op.returned(results)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return *op.gradients(ctx, names, grads), None, None

    # Profiles and anomaly mode show the class's name, so it gets the op's name.
    return type(op.name.replace(".", "_"), (Training,), {})
