"""The public functions ``optimize``, ``restore``, ``optimized`` and ``report``."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from sdfastgn import verification
from sdfastgn.backend import backend_text, why_stock_runs
from sdfastgn.kernels.common import dispatch
from sdfastgn.kernels.common.compile_ahead import prepare
from sdfastgn.kernels.common.gpu import triton
from sdfastgn.patches import fp8_option, patcher
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.graphs import install as graphs
from sdfastgn.patches.layout import channels_last
from sdfastgn.patches.layout.ddp import is_in_ddp
from sdfastgn.patches.layout.left_alone import SLOW_BORDERS
from sdfastgn.patches.lora import merging
from sdfastgn.patches.lora.adapters import unmerged_layers
from sdfastgn.patches.lora.wrappers import is_wrapper
from sdfastgn.patches.offload.moves import follow, is_followed
from sdfastgn.patches.swap.class_forward import is_offloaded_whole
from sdfastgn.patches.swap.exclusive import call_entry, one_at_a_time, undisturbed
from sdfastgn.patches.swap.tested_sources import Untested, newest_release
from sdfastgn.plans import install as planning
from sdfastgn.reports import Entry, Left, Report, grouped, parts_text, some
from sdfastgn.survey import Found, FoundModel, Options, Survey, may_change, models_of, put_back, survey
from sdfastgn.verification import Verdict
from sdfastgn.versions import installed_versions, never_run

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


def _checked(function: F) -> F:
    """A decorator. Calls with an unknown keyword argument raise a TypeError that suggests a known one."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}"
                raise TypeError(f"sdfastgn.{function.__name__}: no argument is called {name!r}; {hint}")
        return function(*args, **options)

    return checked  # type: ignore[return-value]


@_checked
def optimize(
    obj: T,
    *,
    strict: bool = False,
    cuda_graphs: Literal["auto", "training"] | bool = "auto",
    missing_ok: bool = False,
    verify: bool = False,
    fold_batch_norm: bool = False,
    merge_adapters: bool = True,
    exact_tiling: bool = True,
    precision: Literal["fp8"] | None = None,
    plans: bool = True,
    trust: Sequence[str] = (),
) -> T:
    """Make a diffusers pipeline or model faster, in place. ``restore`` undoes this exactly.

    Images differ from those of the original model only by rounding. There are two exceptions: FP8 makes
    larger errors (``precision``), and a tiled decode gives the image of a decode without tiles
    (``exact_tiling``).

    Args:
        obj: a diffusers pipeline, or any ``torch.nn.Module``. In a pipeline, all models that can gain are
            optimized, its image processor, and most schedulers (docs/coverage.md).
        strict: True raises a ValueError if anything must be skipped.
        cuda_graphs: calls of a model are of one kind if their shapes, dtypes and other arguments are equal.
            ``"auto"`` captures the second call of each kind as a CUDA graph, and replays the graph for later
            calls of this kind. In transformers this is done only where Python is slower than the GPU. True
            captures the first call, False none. ``"training"`` is ``"auto"``, and also captures calls with
            gradients (docs/fusions.md, docs/training.md).
        missing_ok: True returns ``obj`` unchanged if there is nothing to optimize. False raises an error for
            a module, and warns for a pipeline or a module that can get adapters.
        verify: True compares fused modules and plans with the original code. Wrong ones get the original code
            again, with a UserWarning. With ``strict`` this is an error (docs/troubleshooting.md).
        fold_batch_norm: True folds each BatchNorm2d that directly follows a Conv2d in an ``nn.Sequential``
            into this Conv2d (docs/fusions.md).
        merge_adapters: True runs a layer with LoRA adapters as one layer, with a copy of its weight to which
            the adapters were added (docs/lora.md).
        exact_tiling: True lets a tiled decode of a VAE give the image of a decode without tiles, where
            possible (docs/memory.md).
        precision: ``"fp8"`` computes most matrix products of transformers in the 8-bit float dtype E4M3
            (docs/fp8.md).
        plans: True runs autoencoders, transformers and some other models as plans. A plan is a list of
            kernels, made from a trace of a call, that replaces the model's Python (docs/plans.md).
        trust: names of Python packages. A model with unknown code that may keep state between calls gets no
            plans, unless the code's package is named here (docs/plans.md).

    Returns:
        ``obj`` itself. Fused modules get subclasses of their own classes. Parameters keep their identity,
        names and values. A second call sets all options again, and optimizes modules that are new. Without a
        GPU, Triton or a tested release of diffusers, modules run their original code, and a UserWarning says
        so once.

    Raises:
        TypeError: ``obj`` is neither a pipeline nor a module.
        ValueError: an option has a wrong value, ``obj`` cannot run in FP8, there is nothing to optimize,
            something must be skipped although ``strict`` is True, or the model is wrapped in
            DistributedDataParallel. Nothing was changed.
        RuntimeError: another thread's call of the model did not end within 30 seconds. Nothing was changed.
    """
    options = Options(
        strict,
        cuda_graphs,
        missing_ok,
        verify,
        fold_batch_norm,
        merge_adapters,
        exact_tiling,
        precision,
        plans,
        trust,
    )
    _optimize("optimize", obj, options)
    return obj


@_checked
def restore(obj: T) -> T:
    """Undo ``optimize`` in place. ``obj`` gets its former classes, strides, attributes and outputs.

    Returns ``obj``. A pipeline or module that is not optimized stays as it is.

    If the pipeline's scheduler or image processor was replaced after ``optimize``, the old one is restored
    too. But a model that was taken out of the pipeline stays optimized: call ``restore`` with this model.

    Other code (tomesd, parametrizations, FSDP) may have changed the class of a fused module. Such a module
    cannot be restored, because only that code can undo its change. All other modules are restored, and a
    UserWarning names the modules that are left: undo the other change, then call ``restore`` again.

    Raises:
        TypeError: ``obj`` is neither a pipeline nor a module.
        ValueError: ``obj`` is optimized and wrapped in DistributedDataParallel: unwrap it first.
        RuntimeError: another thread's call of the model did not end within 30 seconds. Nothing was changed.
    """
    models = {name: named[0][1] for name, named in models_of("restore", obj).items()}
    _refuse_in_ddp("restore", obj, models.values())
    left = []
    with _changing("restore", models.values()):
        for name, model in models.items():
            planning.remove(model)
            graphs.remove(model)
            left += patcher.undo(model, name)
        for name, part in patcher.parts_ever_of(obj):
            left += patcher.undo(part, name)
    if left:
        _warn(_left_over("restore", left))
    return obj


class Optimized(Generic[T]):
    """The result of ``optimized``: a context manager that can also be used as a decorator."""

    def __init__(self, obj: T, options: Options) -> None:
        self._obj = obj
        self._options = options
        # For each ``with`` block that runs now: the states of the components before the block, to which they
        # return at its end, and the models that had nothing to optimize.
        self._blocks: list[tuple[list[Found], WeakSet[nn.Module]]] = []

    def __enter__(self) -> T:
        self._blocks.append(_optimize("optimized", self._obj, self._options))
        return self._obj

    def __exit__(self, *error: object) -> None:
        before, others = self._blocks.pop()
        if not before:
            return
        models = [was for was in before if isinstance(was, FoundModel)]
        _refuse_in_ddp("optimized", self._obj, [was.component for was in models if was.is_stock])
        with _changing("optimized", [*(was.component for was in models), *others]):
            left = put_back(before, others)
            known = {id(was.component) for was in before}
            for name, part in patcher.parts_ever_of(self._obj):
                if id(part) not in known:  # the pipeline got ``part`` inside the block: it is restored too
                    left += patcher.undo(part, name)
        if left:
            _warn(_left_over("optimized", left))

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Decorate a function: each call of the function runs in a ``with`` block of this object."""
        if len(args) != 1 or options or not callable(args[0]):
            raise TypeError(f"sdfastgn.optimized: what it returns cannot be called; {_ONLY_A_BLOCK}")
        function = args[0]

        @functools.wraps(function)
        def inside(*args: Any, **options: Any) -> Any:
            with Optimized(self._obj, self._options):
                return function(*args, **options)

        return inside

    def __getattr__(self, name: str) -> Any:
        # Python calls ``__getattr__`` only for names that the object lacks.
        raise AttributeError(
            f"sdfastgn.optimized: what it returns has no attribute {name!r}; {_ONLY_A_BLOCK}"
        )


# The end of errors about wrong uses of the result of ``optimized``: it says what to do with this result.
_ONLY_A_BLOCK = "use it with `with sdfastgn.optimized(...):`, or call sdfastgn.optimize"


def _with_arguments_of(
    twin: Callable[Concatenate[T, P], T],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[T, P], Optimized[T]]]:
    """A decorator. The decorated function gets the signature of ``twin``, but returns an ``Optimized``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(twin).replace(return_annotation="Optimized[T]")
        vars(function)["__signature__"] = signature
        return _checked(function)

    return decorate


@_with_arguments_of(optimize)
def optimized(obj: T, **options: Any) -> Optimized[T]:
    """A context manager: ``with sdfastgn.optimized(pipe):`` optimizes, and restores at the end of the block.

    The arguments are those of ``optimize``. Errors and warnings are those of ``optimize`` and ``restore``.

    A component that was optimized before the block stays optimized, with its former ``cuda_graphs``,
    ``fold_batch_norm``, ``merge_adapters``, ``exact_tiling``, ``precision``, ``plans`` and ``trust``. All
    other components are restored. If the pipeline gets a new scheduler inside the block, the new scheduler is
    restored too. If the pipeline gets a new model, the new model stays as it is.

    The result is also a decorator: ``@sdfastgn.optimized(pipe)`` optimizes during each call of the function
    below it.
    """
    return Optimized(obj, Options(**options))


def verdicts(obj: Any) -> list[Verdict]:
    """Compare the output of every fused module of ``obj`` with the output of the module's original code.

    Modules whose output is wrong get their original code again. The CUDA graphs of ``obj`` are removed, and
    its matrix products do not run in FP8 any more. Returns a ``Verdict`` for each module.
    """
    found = []
    roots = {name: was.component for name, was in survey("verify", obj).roots.items()}
    with _changing("verify", roots.values()):
        for name, root in roots.items():
            planning.remove(root)
            graphs.remove(root)
            # FP8 is turned off first, because its errors exceed the maximum that the comparison allows.
            fp8_option.set_precision(root, None)
            found += verification.verify(root, name)
    if hasattr(obj, "maybe_free_model_hooks"):
        # If the models are offloaded, the comparison has moved them to the GPU. This call moves them away
        # again.
        obj.maybe_free_model_hooks()
    return found


@_checked
def report(obj: Any) -> Report:
    """Report what is fused in ``obj``, what could be fused, and what is skipped and why. Changes nothing.

    ``print(report)`` prints a summary, and ``print(report.details())`` every module.

    Raises:
        TypeError: ``obj`` is neither a pipeline nor a module.
    """
    seen = survey("report", obj)
    roots = {name: was.component for name, was in seen.roots.items()}
    every = {name: was.component for name, was in seen.every.items()}
    why_stock = {name: why_stock_runs(root) for name, root in every.items()}
    plans = {name: list(planning.inspect(root, name, seen.roots[name].kind)) for name, root in roots.items()}
    planned = {name for name, found in plans.items() if any(each.is_on for each in found)}
    entries = tuple(
        entry for was in (*seen.roots.values(), *seen.parts.values()) for entry in _entries(was, planned)
    )
    states = {name: list(graphs.inspect(root, name)) for name, root in roots.items()}
    for name, root in every.items():
        has_graphs = any(graphed is not None for _, graphed in states.get(name, ()))
        entries += tuple(_more_entries(name, root, entries, has_graphs))
    found = [pair for pairs in states.values() for pair in pairs]
    fused = {name: root for name, root in roots.items() if why_stock[name] is None}
    components = [name or type(root).__name__ for name, root in fused.items()]
    copies = [e for e in entries if (e.status, e.fusion) == ("fused", "transformer_2d")]
    pools = {k: v for _, graphed in found if graphed is not None for k, v in graphed.pool_bytes().items()}
    merged = {name: merging.merged_in(root, name) for name, root in every.items()}
    running = [name for name in every if name in roots or merged[name].layers]
    return Report(
        entries=entries,
        backend=backend_text([every[name] for name in running], [why_stock[name] for name in running])
        if running
        else f"stock code ({_nothing_in(obj)})",
        channels_last_weights=sum(channels_last.converted_weights(root) for root in roots.values()),
        layout_copies_removed=sum(e.component in components for e in copies),
        graphs=tuple(state for state, _ in found),
        graph_memory_bytes=sum(pools.values()),
        runs_kernels=bool(fused),
        merged=tuple(each for each in merged.values() if each.layers),
        fp8=tuple(found for name, root in roots.items() for found in fp8.state_of(root, name)),
        offloaded=tuple(
            name or type(was.component).__name__
            for name, was in seen.models.items()
            if is_offloaded_whole(was.component) and is_followed(was.component)
        ),
        without_kernels=dispatch.ops_without_kernels(),
        plans=tuple(each for found in plans.values() for each in found),
        left=tuple(_left(was) for name, was in seen.models.items() if name not in roots),
    )


def _entries(was: Found, planned: set[str]) -> Iterator[Entry]:
    """Yields an entry of the report for each module of a component and each fusion for such modules.

    ``was``: the component, and what was found about each module in it. ``planned``: names of the components
    that run as plans, which are traced lists of kernels.
    """
    for f in was.findings:
        # One reason not to fuse a model is that PyTorch repeats the borders of videos slowly in
        # channels-last. This reason does not hold for plans (traced lists of kernels), so the report of a
        # model that runs as plans leaves it out.
        if was.name not in planned or f.reason != SLOW_BORDERS:
            component = was.name or type(was.component).__name__
            where = component, f.path, f.fusion.name, type(f.module).__name__
            yield Entry(*where, f.status, f.reason)


def _left(was: FoundModel) -> Left:
    merges = was.takes_adapters and merging.is_allowed(was.component)
    alone = "there are no kernels, CUDA graphs or plans for models of this kind"
    return Left(
        was.name,
        type(was.component).__name__,
        alone + ("; only their LoRA adapters can be merged" if merges else ""),
    )


def _more_entries(name: str, root: nn.Module, entries: Iterable[Entry], has_graphs: bool) -> Iterator[Entry]:
    """Yields an entry of the report for each layer of ``root`` that runs peft's code because of its adapter.

    Also yields an entry for each fusion that the user has asked for and that can change nothing in ``root``.

    ``name``: the name of the component ``root``. ``entries``: the entries of all components so far.
    ``has_graphs``: True if calls of ``root`` may become CUDA graphs.
    """
    component = name or type(root).__name__
    own = [entry for entry in entries if entry.component == component]
    is_optimized = has_graphs or call_entry(root) is not None or any(e.status == "fused" for e in own)
    for path, layer, reason in unmerged_layers(root, name, with_waiting=is_optimized):
        yield Entry(component, path, "adapter", type(layer).__name__, "skipped", reason)
    for fusion in patcher.asked_of(root).difference(entry.fusion for entry in own):
        yield Entry(component, name, fusion, type(root).__name__, "skipped", "it has no part of this kind")


@contextmanager
def _changing(call: str, roots: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which ``roots`` may be changed: no other thread runs these models or changes any model.

    When the context begins, the models' GPUs have finished all their work.
    """
    roots = list(roots)
    with one_at_a_time, undisturbed(call, roots):
        graphs.wait_for_gpus(roots)
        yield


def _optimize(call: str, obj: Any, options: Options) -> tuple[list[Found], WeakSet[nn.Module]]:
    """Does the work of ``optimize`` and ``optimized``. ``call``: which of the two the user has called.

    Returns (the state of each component before the change, other models). The other models have nothing to
    optimize. But offloading may move them between devices, and from now on ``moves.py`` notices this. Both
    collections are empty if there is nothing to optimize in ``obj``.
    """
    _check_options(call, options)
    with one_at_a_time:
        found = survey(call, obj, options)
        roots, every = list(found.roots.values()), found.every
        if not roots:
            _refuse_nothing(call, obj, found, options)
        if not every:
            return [], WeakSet()
        models = [was.component for was in roots]
        if options.precision is not None:
            in_rows = [weight for was in roots if options.plans for weight in was.kind.in_rows]
            fp8_option.check(call, models, in_rows)
        if is_in_ddp(models) and any(map(channels_last.unconverted_weights, models)):
            raise ValueError(_in_ddp(call, obj, "optimize it before it is wrapped"))
        _prepare_triton({device for was in every.values() for device in was.devices})
        before: list[Found] = [*every.values(), *found.parts.values()]
        stay = [was for name, was in found.models.items() if name not in every]
        others = WeakSet(was.component for was in stay if was.component not in was.followed)
        if options.strict:
            _refuse_skipped(call, before, options)
        warn_of_machine(call)
        _warn_of_untested(call, [f for was in before for f in was.findings])
        changing = [w.component for w in every.values() if may_change(w, options, w.name in found.roots)]
        with _changing(call, changing):
            try:
                for was in before:
                    # Without fused modules, convolutions are faster in their present layout. They keep it.
                    # Later the model's first plan, a traced list of kernels, makes them channels-last.
                    waits = was.name not in found.roots or (not was.findings and was.gets_plans)
                    patcher.apply(was.component, was.findings, obj, lays_out=not waits)
                if options.verify:
                    _tell(call, verdicts(obj), options.strict)
                    again = survey(call, obj, options).models  # survey again: wrong modules were restored
                    every = {name: again[name] for name in every}
                _set_options(every.values(), options)
                # From now on ``moves.py`` notices when a model of a pipeline moves between devices, even if
                # the model has nothing to optimize: all models may be offloaded.
                for model in () if isinstance(obj, nn.Module) else found.models.values():
                    follow(model.component)
            except BaseException:
                put_back(before, others)
                raise
            patcher.ask(models, options.asked)
    return before, others


def _refuse_nothing(call: str, obj: Any, found: Survey, options: Options) -> None:
    """Tell the user that there is nothing to optimize in ``obj``, unless ``missing_ok`` is True.

    Also says nothing if a layer has LoRA adapters. Raises ValueError if ``strict`` is True, or if ``obj`` is
    a module that cannot get adapters. Otherwise warns.
    """
    adaptable = found.adaptable
    layers = [layer for was in adaptable.values() for layer in was.modules]
    if options.missing_ok or any(map(is_wrapper, layers)):
        return
    if options.strict or (isinstance(obj, nn.Module) and not adaptable):
        raise ValueError(f"sdfastgn.{call}: {_nothing_in(obj)} (missing_ok=True returns it as it is)")
    later = "; LoRA adapters that it gets will be merged" if adaptable and options.merge_adapters else ""
    _warn(f"sdfastgn.{call}: {_nothing_in(obj)}{later}")


def _set_options(every: Iterable[FoundModel], options: Options) -> None:
    for was in every:
        root = was.component
        merging.allow(root, options.merge_adapters)
        patcher.leave_out(root, options.left_out)
        if options.precision is not None or was.in_fp8:
            has_rows = options.plans and bool(was.kind.in_rows)
            fp8_option.set_precision(root, options.precision, has_rows=has_rows)
        graphs.install(root, options.cuda_graphs)
        planning.install(
            root,
            options.plans,
            frozenset(options.trust),
            options.cuda_graphs,
            verifies=options.verify,
            kind=was.kind,
        )


def _prepare_triton(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            prepare(device)


def _check_options(call: str, options: Options) -> None:
    # ``mode in MODES`` alone would accept 0 and numpy's False, which are equal to False. So the type is
    # checked too.
    mode = options.cuda_graphs
    if type(mode) not in (bool, str) or mode not in graphs.MODES:
        modes = '"auto", "training", True or False'
        raise ValueError(f"sdfastgn.{call}: cuda_graphs={mode!r} must be {modes}")
    if options.precision not in (None, "fp8"):
        raise ValueError(f'sdfastgn.{call}: precision={options.precision!r} must be None or "fp8"')
    for field in fields(Options):
        value = getattr(options, field.name)
        if type(field.default) is bool and type(value) is not bool:
            raise ValueError(f"sdfastgn.{call}: {field.name}={value!r} must be True or False")
    trust: Any = options.trust
    if isinstance(trust, str) or not all(isinstance(n, str) and n.isidentifier() for n in trust):
        raise ValueError(f"sdfastgn.{call}: trust={trust!r} must be a tuple of names of packages")


def _refuse_skipped(call: str, before: list[Found], options: Options) -> None:
    findings = [
        f
        for was in before
        for f in was.findings
        if f.status == "skipped" and not (f.reason == SLOW_BORDERS and options.plans and was.gets_plans)
    ]
    skipped = [(f.reason, f"{f.path or type(f.module).__name__} ({f.fusion.name})") for f in findings]
    for was in before:
        if isinstance(was, FoundModel):
            unmerged = unmerged_layers(was.component, was.name, options.merge_adapters)
            skipped += [(reason, f"{path} (adapter)") for path, _, reason in unmerged]
    if skipped:
        paths = grouped(skipped)
        reasons = "; ".join(f"{reason}: {', '.join(paths[reason])}" for reason in paths)
        raise ValueError(f"sdfastgn.{call}: strict=True and {parts_text(skipped)} cannot be fused: {reasons}")


def _tell(call: str, found: list[Verdict], strict: bool) -> None:
    """Warn of fused modules that were wrong and got their original code again, or were not compared.

    With ``strict``, raises ValueError if a module was wrong.

    ``found``: the results of the comparison. ``call``: the name of the public function, for the warning.
    """
    for status in (verification.PUT_BACK, verification.UNVERIFIED):
        parts = [v for v in found if v.status == status]
        if not parts:
            continue
        paths = grouped((v.reason, v.path or v.kind) for v in parts)
        reasons = "; ".join(f"{reason} ({some(paths[reason])})" for reason in paths)
        text = f"sdfastgn.{call}: verify=True, {len(parts)} of {parts_text(found)} {status}: {reasons}"
        if strict and status == verification.PUT_BACK:
            raise ValueError(text)
        _warn(text)


def _refuse_in_ddp(call: str, obj: Any, roots: Iterable[nn.Module]) -> None:
    converted = [root for root in roots if channels_last.converted_weights(root)]
    if converted and is_in_ddp(converted):
        raise ValueError(_in_ddp(call, obj, "restore it after the wrapper is gone"))


def _in_ddp(call: str, obj: Any, advice: str) -> str:
    return (
        f"sdfastgn.{call}: {type(obj).__name__} is in a DistributedDataParallel, whose buckets need the "
        f"layout that the weights had when it was made; {advice}"
    )


def _nothing_in(obj: Any) -> str:
    kind = type(obj).__name__
    return f"no GroupNorm and no other part that sdfastgn can fuse in {kind}, nothing to optimize"


def _left_over(call: str, left: list[tuple[str, Any]]) -> str:
    """Returns the text of the warning that some modules could not be restored.

    ``left``: (path, module) for each of them. In place of a module it may have an object such as a scheduler.
    """
    found = [(path, type(part)) for path, part in left]
    paths = grouped((f"{cls.__module__}.{cls.__qualname__}", path or cls.__name__) for path, cls in found)
    named = "; ".join(f"{name} at {some(paths[name])}" for name in paths)
    return (
        f"sdfastgn.{call}: {parts_text(left)} could not be restored, because other code has put a class "
        f"of its own over the fused one: {named}. Undo that, then call sdfastgn.restore again. "
        "All else is as it was before."
    )


def _warn(text: str) -> None:
    """Give a UserWarning with the line of the caller's code, outside of this file, that called sdfastgn."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals is globals():
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


# Texts of the warnings about this machine that were already given in this process, and names of the untested
# methods of diffusers of which a warning was given. Each warning is given once per process.
noted: set[str] = set()


def warn_of_machine(call: str) -> None:
    """Warn if no kernel can run on this machine, or if the tests never ran with its versions of packages.

    ``call``: the name of the public function, for the warning.
    """
    for note in _machine_notes():
        if note not in noted:
            noted.add(note)
            _warn(f"sdfastgn.{call}: {note}")


def _warn_of_untested(call: str, found: list[patcher.Finding]) -> None:
    """Warn that modules are not fused because the code of their methods in diffusers was never tested."""
    skipped = [f.reason for f in found if isinstance(f.reason, Untested)]
    methods = Counter(reason.method for reason in skipped)
    if methods.keys() <= noted:
        return
    noted.update(methods)
    named = some(
        [f"{method} ({parts_text(range(count))})" for method, count in methods.most_common()], _SHOWN_METHODS
    )
    release = installed_versions()["diffusers"]
    _warn(
        f"sdfastgn.{call}: {len(skipped)} of {parts_text(found)} run stock's code, at stock's speed, because "
        f"sdfastgn was not tested with the installed code of {named}. Either diffusers {release} is newer "
        "than sdfastgn, or other code has replaced these methods. sdfastgn.report lists the parts, and the "
        "models that run as plans instead. "
        f"What helps: a newer sdfastgn; diffusers {newest_release('diffusers')} or older; or the command "
        "`sdfastgn sources`, which lists the methods and accepts their code once you have read the changes."
    )


# Maximum number of methods of diffusers whose names the warning about untested methods lists. Of the methods
# that one pipeline uses, a release of diffusers seldom changes more.
_SHOWN_METHODS = 8


def _machine_notes() -> Iterator[str]:
    if triton is None or not torch.cuda.is_available():
        missing = "triton is not installed" if triton is None else "no CUDA GPU"
        cost = "here the model runs stock's own code at stock's speed"
        yield f"no kernel runs on this machine ({missing}); {cost}"
    versions = {"torch": torch.__version__, "triton": None if triton is None else triton.__version__}
    notes = [never_run(name, version) for name, version in versions.items() if version is not None]
    if any(notes):
        yield "; ".join(filter(None, notes))
