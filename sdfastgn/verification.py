"""Compares each fused part of a model with stock's code, on the model's own weights and small random inputs.

A part is a fused module. In one small call of the whole model the arguments of each part are recorded. Then
each part is called three times with its arguments: fused, with stock's code, and with stock's code in a wider
dtype. The error of the first two results is their relative difference from the third. For large images a
kernel may run other code than for small images, which this comparison does not check.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.failures import one_line
from sdfastgn.kernels.common.private import is_compiled, tf32
from sdfastgn.model_inputs import small_call
from sdfastgn.patches import patcher
from sdfastgn.patches.layout import channels_last

RIGHT, PUT_BACK, UNVERIFIED = "right", "put back", "not verified"
# A part is right if its error is at most ``_FACTOR`` times the error of stock's code, plus ``_UNITS`` units
# of rounding (the dtype's eps). A fused part rounds less often than stock's code, but in another order. So
# its error may be larger by chance if the result has only a few hundred elements. The error of a broken part
# is far larger.
_FACTOR = 4.0
# Without these units of rounding, a part would have to be exact where stock's error is zero by chance.
_UNITS = 1.0

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """The result of the verification of one fused part.

    ``kind``: the name of the module's class. ``status``: ``RIGHT``, ``PUT_BACK`` (the output was wrong, and
    the part got stock's code again) or ``UNVERIFIED``. ``reason``: the reason for the status; empty for
    ``RIGHT``. ``error`` and ``stock_error``: the relative errors of the part and of stock's code; None if the
    part was not compared.
    """

    path: str
    kind: str
    fusions: tuple[str, ...]
    status: str
    reason: str = ""
    error: float | None = None
    stock_error: float | None = None


def verify(root: nn.Module, prefix: str = "") -> list[Verdict]:
    """Compare the fused parts of ``root`` with stock's code, inner parts first. Returns a Verdict for each.

    Parts whose error is larger than ``_FACTOR`` and ``_UNITS`` allow get stock's code again. The caller must
    have removed all CUDA graphs of ``root``. ``prefix``: the path of ``root`` in the pipeline.
    """
    fusions: dict[nn.Module, list[patcher.Finding]] = defaultdict(list)
    for finding in patcher.inspect(root, prefix):
        if finding.status == "fused":
            fusions[finding.module].append(finding)
    if not fusions:
        return []
    with torch.no_grad(), _without_autocast(), _evaluating(root):
        recorded, reason = _recorded(root, list(fusions))
        verdicts = []
        for module in sorted(fusions, key=lambda module: -fusions[module][0].path.count(".")):
            path, names = fusions[module][0].path, tuple(f.fusion.name for f in fusions[module])
            status, why, *errors = UNVERIFIED, reason or "the small call does not reach it"
            if module in recorded:
                status, why, *errors = _judge(module, recorded.pop(module))
                channels_last.apply(root)  # stock's code in ``_judge`` has restored stock's layout
            verdicts.append(Verdict(path, type(module).__name__, names, status, why, *errors))
            if status == PUT_BACK:
                patcher.put_back(fusions[module], why)
    return verdicts


def _recorded(root: nn.Module, modules: list[nn.Module]) -> tuple[dict[nn.Module, Inputs], str]:
    """Calls ``root`` with stock's code and small inputs, and records the arguments of each of ``modules``.

    Returns ({module: its arguments}, ""), or ({}, why the call cannot be made).
    """
    weight = next((p for p in root.parameters() if p.is_floating_point()), None)
    if weight is None or weight.is_meta or not (dispatch.has_kernels(weight) or hasattr(root, "_hf_hook")):
        return {}, f"no kernel runs: {dispatch.why_off or 'its weights are on no GPU, or of another dtype'}"
    try:
        call = small_call(root, weight.dtype, weight.device)
        if call is None:
            return {}, f"there are no inputs for a {type(root).__name__}"
        with _kept_tensors(root):
            return record(modules, call), ""
    except Exception as error:  # the inputs may not fit an unusual configuration, so any error may occur
        return {}, f"the small call fails: {one_line(error)}"
    finally:
        channels_last.apply(root)


def record(modules: list[nn.Module], call: Callable[[], object]) -> dict[nn.Module, Inputs]:
    """Runs ``call`` with stock's code. Returns {module: the arguments of its first call} for ``modules``."""
    found: dict[nn.Module, Inputs] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in found:
            found[module] = _copied((args, kwargs))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        with dispatch.stock_code():
            call()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _judge(module: nn.Module, inputs: Inputs) -> tuple[Any, ...]:
    """Compares a fused part with stock's code. Returns (status, reason, error, error of stock's code).

    Returns only (status, reason) if the part could not be compared.
    """
    if any(map(is_compiled, module.modules())):
        return UNVERIFIED, "it is compiled by torch.compile"
    images = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point()]
    if not any(map(dispatch.has_kernels, images)):
        return UNVERIFIED, f"no kernel runs: {dispatch.why_off or 'none takes its inputs'}"
    try:
        error, stock_error, bound = compare(module, inputs)
    except _FusedError as failure:
        return PUT_BACK, f"verification: it raises {one_line(failure.__cause__ or failure)}"
    except Exception as failure:  # too little memory or weights on another device, for instance
        return UNVERIFIED, f"stock's code fails: {one_line(failure)}"
    if dispatch.why_off is not None:
        return UNVERIFIED, f"no kernel runs: {dispatch.why_off}"
    if not bound < float("inf"):
        return UNVERIFIED, "stock's own output is not finite", error, stock_error
    if error <= bound:  # False if the error is NaN
        return RIGHT, "", error, stock_error
    why = f"verification: its error is {error:.2g}, stock's {stock_error:.2g}"
    return PUT_BACK, why, error, stock_error


class _FusedError(Exception):
    """Raised if a fused part fails. The ``__cause__`` is the exception that says why."""


def compare(module: nn.Module, inputs: Inputs) -> tuple[float, float, float]:
    """Compares each output of ``module``, a fused part, with stock's.

    Returns (error, error of stock's code, maximum error) of the worst output: the one whose error exceeds its
    maximum by most. Outputs that only stock's code returns are not compared: stock's caches may have entries
    that nothing reads. Raises ``_FusedError`` if the fused part raises an exception or lacks stock's first
    output. Exceptions of stock's code are not caught.
    """
    try:
        fused = _outputs(module, _copied(inputs, channels_last=True))
    except Exception as error:
        raise _FusedError from error
    with dispatch.stock_code():
        stock = _outputs(module, _copied(inputs))
        first = next(iter(stock))
        if first not in fused:
            raise _FusedError from ValueError("its result has no tensor where stock's has one")
        wide = torch.float64 if stock[first].dtype is torch.float32 else torch.float32
        with tf32(convolutions=False, products=False):
            truth = _outputs(copy.deepcopy(module).to(wide), _copied(inputs, dtype=wide))
    found = []
    for path in {first: None, **fused}:
        y, expected, true = fused[path], stock[path], truth[path]
        stock_error = _relative_error(expected, true)
        bound = _FACTOR * stock_error + _UNITS * torch.finfo(expected.dtype).eps
        found.append((_relative_error(y, true), stock_error, bound))
    # An error of NaN is the worst: ``not nan <= bound`` is True, as for an error above its maximum.
    return max(found, key=lambda each: (not each[0] <= each[2], each[0] - each[2]))


def _outputs(module: nn.Module, inputs: Inputs) -> dict[tuple[Any, ...], Tensor]:
    """Calls ``module``. Returns {(keys and indices of a place in the result): floating-point tensor}."""
    args, kwargs = inputs
    with _kept_tensors(module):
        return dict(_tensors(module(*args, **kwargs)))


def _tensors(result: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(result, Tensor) and result.is_floating_point():
        yield path, result
    elif isinstance(result, (Mapping, tuple, list)):
        for key, each in result.items() if isinstance(result, Mapping) else enumerate(result):
            yield from _tensors(each, (*path, key))


def _relative_error(y: Tensor, truth: Tensor) -> float:
    norm = truth.norm().clamp(min=torch.finfo(truth.dtype).tiny)
    return float((y.to(truth.dtype) - truth).norm() / norm)


def _copied(inputs: Inputs, *, dtype: torch.dtype | None = None, channels_last: bool = False) -> Inputs:
    """A copy of ``inputs`` with copies of all tensors.

    ``dtype``: new dtype of floating-point tensors. ``channels_last``: True to make 4-d tensors channels-last.
    """

    def copied(t: Tensor) -> Tensor:
        t = t.to(dtype) if dtype is not None and t.is_floating_point() else t
        is_image = channels_last and t.dim() == 4
        return t.clone(memory_format=torch.channels_last if is_image else torch.preserve_format)

    return tree_map_only(Tensor, copied, inputs)


@contextlib.contextmanager
def _kept_tensors(root: nn.Module) -> Iterator[None]:
    """A context that restores attributes of ``root``'s modules: those that were tensors or None before.

    Some convolutions of video keep the last frames in an attribute, for their next call. Without this
    context, a second call with equal inputs would have another result.
    """
    before = [
        (vars(module), {k: v for k, v in vars(module).items() if v is None or isinstance(v, Tensor)})
        for module in root.modules()
    ]
    try:
        yield
    finally:
        for attributes, kept in before:
            attributes.update(kept)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """A context without autocast, in which stock's code in fp32 would also compute in half precision."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    """A context in which all modules are in eval mode, because dropout would make equal calls differ."""
    training = [module for module in root.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
