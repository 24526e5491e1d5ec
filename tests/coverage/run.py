"""Runs a row of the coverage table stock, optimized and restored, and notes what was left alone."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

import sdfastgn
from sdfastgn.bench.images import relative_error
from tests.coverage.transformers import check_report

# What may follow a norm, by the name of the function.
_PASSES = {
    **dict.fromkeys(("mul", "__mul__"), "scale"),
    **dict.fromkeys(("add", "__add__"), "shift"),
    **dict.fromkeys(("silu", "gelu", "relu", "mish", "sigmoid"), "activation"),
}
_COPIES = ("contiguous", "cat")


@dataclass(frozen=True)
class Result:
    """``fused``, ``plans``, ``graphs``: names of components. ``left``: what is neither fused nor in plans.

    ``error``: of the optimized output, relative to stock's.
    """

    name: str
    kind: str
    fused: tuple[str, ...]
    plans: tuple[str, ...]
    graphs: tuple[str, ...]
    left: tuple[str, ...]
    error: float
    restored: bool

    @property
    def verdict(self):
        if not self.fused:
            return "plans" if self.plans else "left alone"
        return "partly" if self.left else "fused"


class _Stock(TorchFunctionMode):
    """Notes which modules are called, and the passes behind the result of each ``group_norm``."""

    def __init__(self):
        super().__init__()
        self.called = set()
        self.passes = {}
        self._inside = []
        self._last = None

    def __enter__(self):
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._enter_module(module)),
            register_module_forward_hook(lambda *_: self._leave_module(), always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module):
        self.called.add(module)
        self._inside.append(module)

    def _leave_module(self):
        self._inside.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is F.group_norm:
            self._last = self._inside[-1], result
            self.passes.setdefault(self._inside[-1], set())
        elif self._last is not None and args and isinstance(result, Tensor):
            norm, tensor = self._last
            taken = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
            if taken is tensor:
                self._follow(norm, func.__name__, tensor, result)
        return result

    def _follow(self, norm, name, tensor, result):
        kind = _PASSES.get(name)
        if kind == "shift" and "scale" not in self.passes[norm]:
            return  # a residual sum
        if kind is not None:
            self.passes[norm].add(kind)
        same_memory = result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if kind in ("scale", "shift") or name in _COPIES or same_memory:
            self._last = norm, result


def run(row):
    """Raises what the pipeline or sdfastgn raises."""
    obj, call = row.build()
    with torch.no_grad():
        with _Stock() as stock:
            expected = output(call)
        before = attributes(obj)
        sdfastgn.optimize(obj, missing_ok=isinstance(obj, nn.Module))
        found = output(call)
        report = sdfastgn.report(obj)
        check_report(row.name, obj, report)
        restored = attributes(sdfastgn.restore(obj)) == before
        restored = restored and torch.equal(output(call), expected)
    assert expected.double().std() > 0
    return Result(
        row.name,
        type(obj).__name__,
        # The search for the device is every pipeline's.
        tuple(dict.fromkeys(e.component for e in report.fused if e.fusion != "execution_device")),
        _components(p for p in report.plans if p.calls),
        _components(report.graphs),
        tuple(dict.fromkeys(_left(obj, report, stock))),
        relative_error(found, expected),
        restored,
    )


def _components(found):
    return tuple(dict.fromkeys((each.path or each.kind).partition(".")[0] for each in found))


def attributes(obj):
    """Of each module of a pipeline or model: class, names of attributes, strides of weights."""
    roots = [obj] if isinstance(obj, nn.Module) else obj.components.values()
    modules = {m for root in roots if isinstance(root, nn.Module) for m in root.modules()}
    return {m: (type(m), {*vars(m)}, [p.stride() for p in m.parameters(recurse=False)]) for m in modules}


def output(call):
    torch.manual_seed(0)  # for what takes no generator
    output = call()
    return torch.as_tensor(np.stack(output) if isinstance(output, list) else output)


def _left(obj, report, stock):
    """One reason for each part that was called and is neither fused nor in a plan."""
    planned = set(_planned(obj, report))
    known = {}
    for entry in report.entries:
        known.setdefault(entry.path, set()).add(entry.fusion)
        if entry.status == "skipped" and _module(obj, entry.path) not in planned:
            yield f"`{entry.kind}`: {entry.reason}"
    for name, root in {"": obj}.items() if isinstance(obj, nn.Module) else obj.components.items():
        # Text encoders and vocoders are not diffusers'.
        if not isinstance(root, nn.Module) or type(root).__module__.startswith("transformers."):
            continue
        modules = {p: m for p, m in root.named_modules(prefix=name) if m not in planned}
        if stock.called.isdisjoint(modules.values()):
            continue
        has_norms = not stock.passes.keys().isdisjoint(root.modules())
        if not has_norms and planned.isdisjoint(root.modules()) and not _is_inside(root, name, report.fused):
            found = ", ".join(sorted(set().union(*(known.get(path, set()) for path in modules))))
            yield f"`{type(root).__name__}` has no GroupNorm" + (f" (fused: {found})" if found else "")
        yield from _left_of_norms(modules, known, stock.passes)


def _planned(obj, report):
    """The modules whose calls were run by plans, and the modules in them."""
    for found in report.plans:
        if found.calls:
            yield from _module(obj, found.path).modules()


def _module(obj, path):
    if isinstance(obj, nn.Module):
        return obj.get_submodule(path)
    name, _, rest = path.partition(".")
    component = obj.components.get(name)
    return component.get_submodule(rest) if isinstance(component, nn.Module) else component


def _is_inside(root, name, fused):
    """True if every parameter of ``root`` belongs to a fused part."""
    parts = tuple(f"{entry.path}." for entry in fused)
    return all(path.startswith(parts) for path, _ in root.named_parameters(prefix=name))


def _left_of_norms(modules, known, passes):
    """``known``: the fusions about each path."""
    found = {}
    for path, module in modules.items():
        own, parent = known.get(path, set()), path.rpartition(".")[0]
        if module not in passes or parent in known:
            continue
        if not own:
            yield f"`{type(module).__name__}` is a norm without a fusion"
        kept = passes[module] - ({"scale", "shift"} if "ada_group_norm" in own else set())
        if kept:
            found.setdefault(type(modules[parent]).__name__, set()).update(kept)
    for name, kept in found.items():
        words = ", ".join(word for word in ("scale", "shift", "activation") if word in kept)
        yield f"`{name}`: norm fused, not the {words} behind it"
