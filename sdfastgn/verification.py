"""Compares each fused module with its original code, on the model's own weights and small random inputs.

A *part* is a fused module, and *stock's code* is the original code of diffusers or PyTorch. In one small call
of the whole model the arguments of each part are recorded. Then each part is called three times with its
arguments: fused, with stock's code, and with stock's code in a wider dtype. The error of the first two
results is their relative difference from the third. For large images a kernel may run other code than for
small images, which this comparison does not check.
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
# A fused module is right if its error is at most ``_FACTOR`` times the error of the original code, plus
# ``_UNITS`` units of rounding (the dtype's eps). The fused module rounds less often than the original code,
# but in another order. So the error of the fused module may be larger by chance if the result has only a few
# hundred elements. The error of a broken module is far larger.
_FACTOR = 4.0
# The error of a fused module may always have this number of units of rounding. Otherwise the module would
# have to be exact where the error of the original code is zero by chance.
_UNITS = 1.0

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison of one fused module with its original code.

    ``path``: the module's path. ``kind``: the name of the module's class. ``fusions``: names of the fusions
    that changed the module. ``status``: ``RIGHT``, ``PUT_BACK`` (the output was wrong, and the module got its
    original code again) or ``UNVERIFIED``. ``reason``: the reason for the status; empty for ``RIGHT``.
    ``error`` and ``stock_error``: the relative errors of the fused and of the original code; None if they
    were not compared.
    """

    path: str
    kind: str
    fusions: tuple[str, ...]
    status: str
    reason: str = ""
    error: float | None = None
    stock_error: float | None = None


def verify(root: nn.Module, prefix: str = "") -> list[Verdict]:
    """Compare the fused modules of ``root`` with their original code. Returns a ``Verdict`` for each.

    Modules inside of other fused modules come first. A module whose error is too large gets its original code
    again. The caller must have removed all CUDA graphs of ``root``.

    ``prefix``: the path of ``root`` in the pipeline.
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
                # A call without kernels may have restored the weights' layout (``channels_last.enter``).
                # Fused code needs channels-last.
                channels_last.apply(root)
            verdicts.append(Verdict(path, type(module).__name__, names, status, why, *errors))
            if status == PUT_BACK:
                patcher.put_back(fusions[module], why)
    return verdicts


def _recorded(root: nn.Module, modules: list[nn.Module]) -> tuple[dict[nn.Module, Inputs], str]:
    """Calls ``root`` with its original code and small inputs. Records the arguments of each of ``modules``.

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
    except Exception as error:  # any error may occur: the inputs may not fit an unusual configuration
        return {}, f"the small call fails: {one_line(error)}"
    finally:
        channels_last.apply(root)


def record(modules: list[nn.Module], call: Callable[[], object]) -> dict[nn.Module, Inputs]:
    """Runs ``call`` with the original code of all models. Returns the arguments that ``modules`` get.

    The result is a dict: module -> the arguments of the module's first call. Modules that ``call`` does not
    run are not in it.
    """
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
    """Compares a fused module with its original code.

    Returns (status, reason, error of the fused code, error of the original code). Returns only (status,
    reason) if the two could not be compared.
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
    except Exception as failure:  # the original code fails, for example for lack of memory
        return UNVERIFIED, f"stock's code fails: {one_line(failure)}"
    if dispatch.why_off is not None:
        return UNVERIFIED, f"no kernel runs: {dispatch.why_off}"
    if not bound < float("inf"):
        return UNVERIFIED, "stock's own output is not finite", error, stock_error
    if error <= bound:  # an error of NaN is not accepted: ``nan <= bound`` is False
        return RIGHT, "", error, stock_error
    why = f"verification: its error is {error:.2g}, stock's {stock_error:.2g}"
    return PUT_BACK, why, error, stock_error


class _FusedError(Exception):
    """Raised if the fused code of a module raises an error, which is the ``__cause__``."""


def compare(module: nn.Module, inputs: Inputs) -> tuple[float, float, float]:
    """Compares each output of the fused ``module`` with that of the module's original code.

    Returns (error, error of the original code, maximum error) of the worst output: the output whose error
    exceeds its maximum by most. Outputs that only the original code returns are not compared, because caches
    of the original code may have entries that nothing reads. Raises ``_FusedError`` if the fused code raises
    an exception or does not return the original code's first output. Exceptions of the original code are not
    caught.
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
    # An error of NaN counts as above its maximum, because ``not nan <= bound`` is True.
    return max(found, key=lambda each: (not each[0] <= each[2], each[0] - each[2]))


def _outputs(module: nn.Module, inputs: Inputs) -> dict[tuple[Any, ...], Tensor]:
    """Calls ``module``. Returns a dict of the floating-point tensors in the result.

    The key of a tensor is its place in the result: the keys and indices that lead to it.
    """
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
    """Returns a copy of ``inputs``, the arguments of a call, with copies of all tensors.

    ``dtype``: new dtype of floating-point tensors. ``channels_last``: True to make 4-d tensors channels-last.
    """

    def copied(t: Tensor) -> Tensor:
        t = t.to(dtype) if dtype is not None and t.is_floating_point() else t
        is_image = channels_last and t.dim() == 4
        return t.clone(memory_format=torch.channels_last if is_image else torch.preserve_format)

    return tree_map_only(Tensor, copied, inputs)


@contextlib.contextmanager
def _kept_tensors(root: nn.Module) -> Iterator[None]:
    """A context after which attributes of the modules in ``root`` that are tensors or None are as before.

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
    """A context without autocast, because under autocast code in fp32 would compute in half precision."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    """A context in which all modules of ``root`` are in eval mode. Dropout would make equal calls differ."""
    training = [module for module in root.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
