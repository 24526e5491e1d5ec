"""What an op of this package is: one declaration for PyTorch's dispatcher, and the cheap ways around it.

``torch.compile``, export, fake tensors and autograd know an op by its registration (ADR 2). A plain
call has no use for the dispatcher, which costs more CPU time than a small kernel takes on the GPU:

- plain inference launches;
- plain training launches inside an ``autograd.Function``, at a fifth of the registered autograd's cost;
- every other call goes through the dispatcher, or runs in PyTorch's own ops where no kernel can.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from sdfastgn.kernels._ops import add_op_namespace_prefix, ops
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.plan_cache import PlanCache

__all__ = ["Op", "Plan", "PlannedOp"]

_LIBRARY = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "FRAGMENT")


class Op:
    """The op ``sdfastgn::<name>`` for CPU and CUDA tensors.

    Args:
        schema: ``name(arguments) -> results``.
        arguments: a NamedTuple of the schema's arguments, in their order. Fields with defaults may
            follow, which only the kernels know.
        run: ``arguments -> results``.
        fake: the same for tensors without data: shapes, strides and dtypes.
        save: ``(ctx, arguments, results)`` keeps what ``backward`` takes.
        backward: ``(ctx, needs, *gradients of the results) -> gradients by argument``. ``needs`` are
            arguments too, each True where its gradient is wanted. None: the op has no gradient.
        hidden: so many of the last results are for the backward alone.
    """

    def __init__(
        self,
        schema: str,
        arguments: Any,
        run: Callable[[Any], Any],
        fake: Callable[[Any], Any],
        save: Callable[[Any, Any, Any], None] = lambda ctx, call, results: None,
        backward: Callable[..., dict[str, Tensor | None]] | None = None,
        hidden: int = 0,
    ) -> None:
        name = schema.partition("(")[0]
        self.name, self.arguments, self.save = f"sdfastgn.{name}", arguments, save
        self._backward: Any = backward
        _LIBRARY.define(schema)
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
        # "Tensor", "float" ... of each argument
        self._kinds = [text.split()[0] for text in schema.partition("(")[2].partition(")")[0].split(", ")]
        self._count = len(self._kinds)

    def through_dispatcher(self, call: Any) -> Any:
        """The results for ``call``, an instance of ``arguments``."""
        return self._registered(
            *tuple(call)[: self._count]
        )  # torch.compile of PyTorch 2.8 slices no NamedTuple

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
        """What ``backward`` finds for the arguments ``names``, which are those that autograd asks about."""
        # Compiled autograd of PyTorch 2.8 traces this: of a NamedTuple it knows the fields, and no
        # ``_replace``, ``_make``, ``_asdict``, slice or property.
        asked = dict(zip(names, ctx.needs_input_grad, strict=False))
        needs = self.arguments(*[asked.get(name, False) for name in self.arguments._fields])
        return tuple(map(self._backward(ctx, needs, *grads).get, names))


class Plan(Protocol):
    """How one kind of call is launched, on valid arguments that are not empty."""

    def run(self, call: Any) -> Any:
        """What the caller of the public function gets."""

    def run_and_save(self, call: Any) -> Any:
        """All results of the op, those for the backward too."""


class PlannedOp(Op):
    """An op that is launched by a plan, made once for each kind of call.

    Args:
        schema, arguments, fake, save, backward, hidden: as in ``Op``.
        plan: ``arguments -> Plan``.
        reference: ``arguments -> results`` in plain PyTorch.
        check: ``(public name, arguments)``, raises where an argument is wrong.
        plain: ``arguments -> what the caller gets``, where PyTorch's own autograd sees every step.
            None: what it gets of ``reference``.
    """

    def __init__(
        self,
        schema: str,
        arguments: Any,
        *,
        plan: Callable[[Any], Plan],
        reference: Callable[[Any], Any],
        fake: Callable[[Any], Any],
        save: Callable[[Any, Any, Any], None],
        backward: Callable[..., dict[str, Tensor | None]],
        check: Callable[[str, Any], None],
        hidden: int = 0,
        plain: Callable[[Any], Any] | None = None,
    ) -> None:
        @dispatch.retried
        def run(call: Any) -> Any:
            if call[0].numel() == 0:
                results = fake(call)
                for result in (results,) if isinstance(results, Tensor) else results:
                    result.zero_()
                return results
            if dispatch.runs_in_triton(call[0]):
                return self._planned(call, True).run_and_save(call)
            return reference(call)

        super().__init__(schema, arguments, run, fake, save, backward, hidden)
        self._plans: PlanCache[Plan] = PlanCache()
        self._plan, self._check = plan, check
        values = [i for i, kind in enumerate(self._kinds) if "Tensor" not in kind]
        self._values = _picker(values)
        tensors = [i for i in range(len(arguments._fields)) if i not in values]
        self._tensors = _picker(tensors)
        self._train = _training_function(self, tuple(arguments._fields[i] for i in tensors)).apply
        self._plain = plain or (lambda call: self.returned(reference(call)))

    def __call__(self, call: Any, name: str | None = None) -> Any:
        """What the public function ``name`` returns: the cheapest way that is right for ``call``."""
        x = call[0]
        if dispatch.is_plain(x, call):
            tensors = self._tensors(call)
            trains = torch.is_grad_enabled() and dispatch.wants_gradient(x, tensors)
            try:
                # What is wrong finds no plan, and is then checked.
                plan = self._plans.get(self._key(call, tensors, trains))
                if plan is None:
                    self._check(name or self.name, call)
                    plan = self._planned(call, trains) if x.numel() else None
                if plan is not None:
                    return self._train(*tensors, call, plan) if trains else plan.run(call)
            except dispatch.KernelError:
                return self(call, name)
            # A number for a tensor; a tensor without strides or memory; a value without a hash.
            except (AttributeError, RuntimeError, TypeError):
                self._check(name or self.name, call)
                raise
        self._check(name or self.name, call)
        if not dispatch.needs_op(x):
            return self._plain(call)
        return self.returned(self.through_dispatcher(call))

    def _key(self, call: Any, tensors: tuple[Tensor | None, ...], saves: bool) -> tuple[Any, ...]:
        """As ``plan_key``, with the tensors first: less time."""
        return (
            *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors],
            *self._values(call),
            saves,
        )

    def _planned(self, call: Any, saves: bool) -> Plan:
        key = self._key(call, self._tensors(call), saves)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(call)
        return plan


def _picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """``call -> the arguments at these places``."""
    if not places:
        return lambda call: ()
    return itemgetter(*places) if len(places) > 1 else lambda call: (call[places[0]],)


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
