"""The classes of this package's ops. They register an op with PyTorch, and run its calls.

A call is *plain* if its arguments are ordinary tensors and numbers, a kernel can run, and PyTorch neither
traces nor transforms the call (``dispatch.is_plain``). ``torch.compile``, export and fake tensors need the
registration (docs/adr/0002-op-registration.md), and plain calls do not. Plain calls skip PyTorch's
dispatcher, because the dispatcher takes more CPU time than a small kernel runs on the GPU. So calls run in
one of these ways:

- a plain call without gradients launches the kernels directly;
- a plain call with gradients launches them inside an ``autograd.Function``, which takes a fifth of the CPU
  time that autograd through the dispatcher takes;
- every other call goes through the dispatcher. But if no kernel can run, in exports to ONNX, in torch.func
  transforms and in forward-mode AD, the call runs in PyTorch's own ops instead (``dispatch.needs_op``).
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
        name: the op's name in ``torch.ops.sdfastgn``.
        arguments: the declaration of the op's arguments: a NamedTuple class with one annotated field for each
            argument (``common/declaration.py``).
        results: the part of the op's schema that describes the results, such as ``"(Tensor, Tensor)"``.
        run: function ``call -> results``. ``call`` is an instance of ``arguments``.
        fake: function ``call -> results`` for tensors without data. It computes only shapes, strides and
            dtypes.
        save: function ``(ctx, call, results)``. It stores in ``ctx`` what ``backward`` needs.
        backward: function ``(ctx, needs, *gradients of the results) -> {argument's name: gradient}``.
            ``needs`` is an instance of ``arguments``: a field is True if its gradient is wanted. If
            ``backward`` is None, the op has no gradients.
        hidden: number of trailing results that only the backward uses. Callers do not get them.
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
        """Run ``call``, an instance of ``arguments``, through PyTorch's dispatcher.

        Returns all results, including those that only the backward uses (``hidden``).
        """
        # ``call`` becomes a tuple first, because torch.compile of PyTorch 2.8 cannot slice a NamedTuple.
        return self._registered(*tuple(call)[: self._count])

    def _save_registered(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if self._hidden:
            ctx.mark_non_differentiable(*output[-self._hidden :])
        self.save(ctx, self.arguments(*inputs), output)

    def returned(self, results: Any) -> Any:
        """Returns ``results`` without those at the end that only the backward uses.

        Returns a tuple, or a tensor if only one result is left.
        """
        if not self._hidden:
            return results
        shown = results[: -self._hidden]
        return shown[0] if len(shown) == 1 else shown

    def gradients(self, ctx: Any, names: tuple[str, ...], grads: Any) -> tuple[Tensor | None, ...]:
        """The gradients of the arguments ``names``, in their order.

        ``names``: the arguments that were passed to autograd, in the order of ``ctx.needs_input_grad``.
        ``grads``: the gradients of the results.
        """
        # Compiled autograd of PyTorch 2.8 traces this code. Of a NamedTuple it supports only the fields, and
        # not ``_replace``, ``_make``, ``_asdict``, slices or properties. So these are not used here.
        asked = dict(zip(names, ctx.needs_input_grad, strict=False))
        needs = self.arguments(*[asked.get(name, False) for name in self.arguments._fields])
        return tuple(map(self._backward(ctx, needs, *grads).get, names))


class PlannedOp(Op):
    """An op that decides once for all calls with equal shapes, strides and dtypes how to launch its kernels.

    The decision is an object, the *plan* of these calls (``common/plan_cache.py``).

    Args:
        name, arguments, fake: the op's name, the declaration of its arguments, and a function
            ``call -> results`` for tensors without data, as in ``Op``.
        results: names of the results that the caller gets.
        saved: names of further results, which only the backward uses.
        plan: function ``call -> SavingPlan``. ``call`` is an instance of ``arguments``. Its tensors have
            layouts that kernels can read (``declaration.without_gaps``).
        reference: function ``call -> (*results, *saved)`` in plain PyTorch.
        backward: a ``GradOp``, which computes the gradients. Its declaration must be the result of
            ``backward_of(arguments, saved, ...)``. Or a function
            ``(ctx, needs, *gradients of the results) -> {argument's name: gradient}`` as in ``Op``; then
            ``save`` is needed too.
        save: function ``(ctx, call, results)`` that stores in ``ctx`` what ``backward`` needs. None if
            ``backward`` is a ``GradOp``.
        check: function ``(public name, call)`` that raises an error for wrong arguments which the annotations
            in the declaration do not exclude. It is called after the check of the first operand.
        plain: function ``call -> what the caller gets`` in PyTorch's own differentiable ops. It runs if no
            kernel can run on the first operand, in exports to ONNX, in torch.func transforms and in
            forward-mode AD. If it is None, ``reference`` runs instead, and the results in ``saved`` are
            dropped.
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
        self.plans = Plans(name, arguments, plan)

        def run(call: Any) -> Any:
            if call[0].numel() == 0:
                results = fake(call)
                for result in (results,) if isinstance(results, Tensor) else results:
                    result.zero_()
                return results
            if dispatch.runs_in_triton(call[0]):
                try:
                    return self.plans.of(call).run_and_save(call)
                except dispatch.KernelError as error:
                    self.plans.turn_off(call, error)
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

    def __call__(self, call: Any, name: str | None = None, *, is_plain: bool = False) -> Any:
        """Run ``call`` in the fastest way that is valid for it, and return what the caller gets.

        ``is_plain``: True if the caller has checked that the call can skip PyTorch's dispatcher
        (``dispatch.is_plain``). Then this is not checked again.

        If an argument is wrong, the checks of the declaration or ``check`` raise an error. The error begins
        with ``name``, the name of the public function.
        """
        x = call[0]
        if is_plain or dispatch.is_plain(x, call):
            plans = self.plans
            tensors = plans.tensors(call)
            trains = torch.is_grad_enabled() and dispatch.wants_gradient(x, tensors)
            try:
                # A plan says how to launch the kernels. It is made and cached only for valid arguments. So if
                # a plan is found, the arguments are valid, and need no check.
                plan = plans.made.get(plans.key(call, tensors, trains))
                if plan is None:
                    self.check(name or self.name, call)
                    plan = plans.of(call, trains) if x.numel() else None
                if plan is not None:
                    return self._train(*tensors, call, plan) if trains else plan.run(call)
            except dispatch.KernelError as error:
                plans.turn_off(call, error)
                return self._plain(call)
            # The search for a plan can fail for invalid arguments, such as a number in place of a tensor, a
            # tensor without strides or memory, or a value without a hash. The check then names the argument.
            except (AttributeError, RuntimeError, TypeError):
                self.check(name or self.name, call)
                raise
        self.check(name or self.name, call)
        if not dispatch.needs_op(x):
            return self._plain(call)
        return self.returned(self.through_dispatcher(call))


def _save_for(arguments: Any, saved: int) -> Callable[[Any, Any, Any], None]:
    """Returns the function ``save`` of an op, which stores in ``ctx`` what the op's backward needs.

    It stores the first operand, the last ``saved`` results, the other operands that may have a gradient, and
    the arguments that are neither tensors nor dtypes, in this order. The declaration of the backward, made by
    ``backward_of``, has its fields in the same order.
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
    """Returns the function ``backward`` of an op, which calls ``grad_op``.

    ``grad_op`` gets dy, the gradient of the op's result, and the values that the forward has stored in
    ``ctx`` by the function from ``_save_for``.
    """
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
    """Makes the ``autograd.Function`` for calls of ``op`` that want gradients and skip PyTorch's dispatcher.

    ``names``: the op's arguments that are tensors.
    """

    class Training(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            """Launches the kernels. ``inputs``: the call's tensors, then the call, then its launch plan.

            The tensors are also passed one by one, because autograd does not look for tensors inside a call.
            """
            call, plan = inputs[-2:]
            results = plan.run_and_save(call)
            op.save(ctx, call, results)
            return op.returned(results)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return *op.gradients(ctx, names, grads), None, None

    # The subclass of ``autograd.Function`` gets the op's name, which profiles and anomaly mode show.
    return type(op.name.replace(".", "_"), (Training,), {})
