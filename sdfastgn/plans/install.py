"""Turns plans on and off for the models that get them.

To turn plans on, ``install`` puts a ``PlannedForward`` under the key "forward" into the ``__dict__`` of a
module. As for graphs, the key is another one in some autoencoders (``method_of``) and in models that
accelerate offloads as a whole (``place_in``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from sdfastgn.kernels.common.private import is_compiled
from sdfastgn.patches import patcher
from sdfastgn.patches.code.checked import entrances, stop_checking
from sdfastgn.patches.code.states import States
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8.rows import RowWeights, in_blocks
from sdfastgn.patches.graphs.forward import GraphedForward, Planner
from sdfastgn.patches.graphs.install import outermost, set_mode
from sdfastgn.patches.graphs.models import is_graphable, method_of, numbers_of, takes_gigabytes
from sdfastgn.patches.layout.left_alone import reason_of_cudnn
from sdfastgn.patches.lora.adapters import is_adapted, takes_adapters
from sdfastgn.patches.swap.class_forward import place_in
from sdfastgn.patches.swap.tested_sources import Untested
from sdfastgn.plans.forward import PlannedForward
from sdfastgn.plans.inside import CONVOLUTIONS
from sdfastgn.plans.rewrite.e4m3 import FEWEST_COLUMNS

# Fusions of layers that occur in models of all kinds. Any other fusion is one of blocks.
_OF_LAYERS = ("group_norm", "group_norm_subclass", "sequential", "attention", "conv_norm_out")
# Fusions of parts that encoders, decoders and UNets have. Encoders and decoders are as fast by plans.
_OUTSIDE_UNETS = (
    *("conv_norm_out", "decoder_slices"),  # MoVQ's decoder has only the second one
    *("temporal_resnet_block", "spatio_temporal_res_block"),
)
# Smallest share of a model's weights that must be in convolutions of images and videos, or in linear layers
# of a transformer. Kernels exist for what surrounds these. A model of other layers gains too little to pay
# for a trace.
_SHARE = 0.5
# Most weights in convolutions other than those that cut an image or video into patches, for each weight in
# linear layers, of a transformer that takes the time of the noise. Others have none.
_MIXING = 0.1
# Names of the argument by which models get the time of the noise.
_TIMES = frozenset(("timestep", "timesteps", "t"))
# Largest share of the weights of convolutions that may be in blocks whose code was never tested. With more,
# the whole model runs as plans, which are about as fast as fused blocks.
_UNKNOWN = 0.1


@dataclass(frozen=True)
class Planned:
    """What the report says about the plans of one module.

    Attributes:
        path: the module's dotted path.
        kind: the name of the module's class.
        is_on: False if the module has no plans now, but gets them from ``optimize``.
        plans: number of plans that exist now.
        calls: number of calls whose result came from a plan that ran without a CUDA graph.
        traces: number of traces so far.
        steps: name of a step -> how many of them all plans have.
        kernel_bytes, bytes: bytes that this package's kernels, and all steps, read and write in one run of
            each plan.
        own: reason -> number of calls that ran the model's own code for this reason.
        last_change: the last change of the model that made its plans invalid; empty if there was none.
    """

    path: str
    kind: str
    is_on: bool
    plans: int = 0
    calls: int = 0
    traces: int = 0
    steps: dict[str, int] = field(default_factory=dict)
    kernel_bytes: int = 0
    bytes: int = 0
    own: dict[str, int] = field(default_factory=dict)
    last_change: str = ""

    @property
    def was_called(self) -> bool:
        """True if there was a call of the module, also if only the capture of a CUDA graph made it."""
        return bool(self.plans or self.calls or self.own)


@dataclass(frozen=True)
class Kind:
    """What plans can do for a model (``kind_of``).

    Attributes:
        findings: what each fusion can do with a module in it.
        gains: True if kernels exist for its norms, and its fused blocks are not faster than plans.
        has_plans: True if it has plans now.
        is_transformer: True if most of its weights are in linear layers, and it takes the time of the noise,
            or has norms without parameters, which its code modulates. Nearly all its convolutions cut an
            image or video into patches, and no graphs are made of its own code.
        is_called_each_step: True if it is a UNet or ControlNet of images, in which Python takes longer than
            the GPU. UNets of videos are slower as plans.
        in_rows: the weights of linear layers that its plans may read in E4M3. Empty if it is no transformer.
        why_not: why it gets no plans, even if ``gains`` is True; else None.
    """

    findings: tuple[patcher.Finding, ...]
    gains: bool
    has_plans: bool
    is_transformer: bool
    is_called_each_step: bool
    in_rows: tuple[Tensor, ...]
    why_not: str | None

    @property
    def gets_plans(self) -> bool:
        """True if ``optimize`` gives the model plans."""
        return self.gains or self.has_plans


def kind_of(modules: Sequence[nn.Module], findings: Iterable[patcher.Finding]) -> Kind:
    """The ``Kind`` of a model. ``modules``: the model and all modules in it. ``findings``: about them."""
    findings = tuple(findings)
    is_transformer = _is_transformer(modules)
    gains = (is_transformer or is_convolutional(modules)) and not _is_faster_fused(modules, findings)
    has_plans = has_plans_now(modules[0])
    inside = in_blocks(modules) if is_transformer else ()
    weights = _weights((m for m in modules if m in inside), (nn.Linear,)).values()
    in_rows = [weight for weight in weights if min(weight.shape) >= FEWEST_COLUMNS]
    return Kind(
        findings,
        gains,
        has_plans,
        is_transformer,
        _is_called_each_step(modules),
        tuple(in_rows) if gains or has_plans else (),
        reason_of_cudnn(modules),
    )


def gets_plans(root: nn.Module) -> bool:
    """True if ``optimize`` gives ``root`` plans (``Kind.gets_plans``)."""
    return kind_of_model(root).gets_plans


def kind_of_model(root: nn.Module) -> Kind:
    named = list(root.named_modules())
    return kind_of([module for _, module in named], patcher.inspect_model(named))


def has_plans_now(root: nn.Module) -> bool:
    return any(PlannedForward.of(module) is not None for module in entrances(root))


def is_convolutional(modules: Sequence[nn.Module]) -> bool:
    """True if a model of ``modules`` has norms, and most of its weights are in convolutions."""
    return _has_most_weights(modules, CONVOLUTIONS) and any(map(_is_norm, reversed(modules)))


def _is_transformer(modules: Sequence[nn.Module]) -> bool:
    """See ``Kind.is_transformer``. Norms of other transformers, such as text encoders, have parameters."""
    takes_time = _takes_time(modules[0])
    if not (takes_time or any(map(_is_norm_without_parameters, modules))):
        return False
    if any(map(is_graphable, modules)) or not _has_most_weights(modules, (nn.Linear,)):
        return False
    linear, convolutions = (_weights(modules, (kind,)).items() for kind in (nn.Linear, _ConvNd))
    mixing = sum(weight.numel() for m, weight in convolutions if m.kernel_size != m.stride)
    return mixing <= (_MIXING if takes_time else 0) * sum(weight.numel() for _, weight in linear)


def _takes_time(root: nn.Module) -> bool:
    """True if ``root`` is a denoiser: its forward takes a timestep."""
    forward = getattr(type(root), "forward", None)  # modules of torch.jit have none
    return forward is not None and not _TIMES.isdisjoint(signature(forward).parameters)


def _is_called_each_step(modules: Sequence[nn.Module]) -> bool:
    """See ``Kind.is_called_each_step``."""
    convolutions = [m for m in modules if isinstance(m, _ConvNd)]
    is_of_images = all(isinstance(m, nn.Conv2d) for m in convolutions) and not takes_gigabytes(modules[0])
    return bool(numbers_of(modules[0]) and convolutions) and is_of_images


def _blocks(findings: Iterable[patcher.Finding]) -> list[patcher.Finding]:
    return [finding for finding in findings if finding.fusion.name not in _OF_LAYERS]


def _is_faster_fused(modules: Sequence[nn.Module], findings: Sequence[patcher.Finding]) -> bool:
    """True if fused blocks make a model of ``modules`` faster than plans. ``findings``: about its modules."""
    is_outside_unets = not _takes_time(modules[0]) and any(
        finding.fusion.name in _OUTSIDE_UNETS for finding in findings
    )
    return not is_outside_unets and fused_blocks_pay(modules, _blocks(findings))


def _has_most_weights(modules: Sequence[nn.Module], kinds: tuple[type[nn.Module], ...]) -> bool:
    """True if more than ``_SHARE`` of the weights of ``modules`` are in layers of ``kinds``."""
    parameters = {p for module in modules for p in module._parameters.values() if p is not None}
    if any(map(is_lazy, parameters)):
        return False  # the first call makes its weights
    weights = sum(parameter.numel() for parameter in parameters)
    inside = {id(weight): weight.numel() for weight in _weights(modules, kinds).values()}
    return sum(inside.values()) > _SHARE * weights


def _weights(modules: Iterable[nn.Module], kinds: tuple[type[nn.Module], ...]) -> dict[nn.Module, Tensor]:
    """Layer -> its weight, for each layer of ``kinds`` in ``modules`` that has a weight."""
    found = {m: getattr(m, "weight", None) for m in modules if isinstance(m, kinds)}
    return {m: weight for m, weight in found.items() if isinstance(weight, Tensor)}


def _is_norm_without_parameters(module: nn.Module) -> bool:
    """True if ``module`` may be a norm of any class: a leaf without parameters, but with an eps."""
    if not isinstance(vars(module).get("eps"), float):
        return False
    return not any(True for _ in module.children()) and not any(True for _ in module.parameters())


def _is_norm(module: nn.Module) -> bool:
    """True if ``module`` may be a norm of any class: all its weights are of channels, or it has none."""
    sizes = [(parameter.numel(), max(parameter.shape, default=0)) for parameter in module.parameters()]
    if not sizes:
        return _is_norm_without_parameters(module)
    return all(count == largest > 1 for count, largest in sizes)


def fused_blocks_pay(modules: Iterable[nn.Module], blocks: Sequence[patcher.Finding]) -> bool:
    """True if a model of ``modules`` is faster by the fused ones of ``blocks`` than by plans.

    Plans need no known code. So it is faster by plans if more than a little of the convolutions is in unknown
    blocks. It also is if most convolutions are in no block, such as those over time of some autoencoders.
    """
    if not any(
        finding.status == "fusable" or finding.fusion.is_applied(finding.module) for finding in blocks
    ):
        return False
    sizes = {m: weight.numel() for m, weight in _weights(modules, CONVOLUTIONS).items()}
    inside: dict[nn.Module, bool] = {}  # convolution -> whether its innermost block is unknown
    found = [(list(finding.module.modules()), isinstance(finding.reason, Untested)) for finding in blocks]
    for block, is_unknown in sorted(found, key=lambda each: -len(each[0])):
        inside.update((m, is_unknown) for m in block if m in sizes)
    total, within = sum(sizes.values()), sum(sizes[m] for m in inside)
    unknown = sum(sizes[m] for m, is_unknown in inside.items() if is_unknown)
    return unknown <= _UNKNOWN * total and within >= _SHARE * total


def trusted_in(modules: Iterable[nn.Module]) -> frozenset[str] | None:
    """The packages that plans of ``modules`` trust; None if none of them has plans."""
    found: list[frozenset[str]] = []
    for module in modules:
        planned = PlannedForward.of(module)
        found += [] if planned is None else [planned.trusted]
        graphed = GraphedForward.of(module)
        maker = graphed.planner.make if graphed is not None and graphed.planner is not None else None
        found += [maker.trusted] if isinstance(maker, Maker) else []
    return frozenset().union(*found) if found else None


def install(
    root: nn.Module,
    is_on: bool,
    trusted: frozenset[str] = frozenset(),
    cuda_graphs: str | bool = False,
    *,
    verifies: bool = False,
    former: Sequence[PlannedForward] = (),
    kind: Kind | None = None,
) -> None:
    """Give ``root`` and its children a ``PlannedForward`` each, if ``root`` gets plans. Else remove them.

    A pipeline may call the children of a model by themselves: an autoencoder's ``decode`` calls its decoder.
    A module with CUDA graphs gets a ``Planner`` instead. ``cuda_graphs``: the mode of the graphs that a
    transformer gets with its plans. ``former``: what ``take_off`` has returned, with its plans. ``kind``:
    the ``Kind`` of ``root``; None: it is found here.
    """
    kind = kind_of_model(root) if kind is None else kind
    weights = fp8.row_weights(root)
    has_fp8 = fp8.is_allowed(root) and weights is None  # plans have no products with learned scales
    can_have = is_on and not has_fp8 and kind.why_not is None
    # Graphs take the place of plans in models that do not gain by plans.
    keeps_plans = has_plans_now(root) and next(outermost(root), None) is None
    has_plans = can_have and (kind.gains or keeps_plans)
    is_transformer = (has_plans or GraphedForward.of(root) is not None) and kind.is_transformer
    if is_transformer and has_plans:
        set_mode(root, cuda_graphs)
    elif is_transformer:
        set_mode(root, False)
    maker = Maker(trusted, verifies, weights=weights) if is_on else None
    in_graphs = _set_planners(root, maker, kind, is_transformer)
    if not has_plans and not (can_have and not in_graphs and kind.is_called_each_step):
        remove(root)
        return
    for module in root.modules():  # also modules with plans because of a boundary (``inside.py``)
        if (planned := PlannedForward.of(module)) is None:
            continue
        planned.set_options(trusted, verifies, weights)
        if not in_graphs.isdisjoint(module.modules()):
            planned.take_off()  # a plan would not run the graphs of the modules in it
    for module in entrances(root):
        planned = PlannedForward.of(module)
        method = method_of(module)
        place = place_in(module, method) if in_graphs.isdisjoint(module.modules()) else None
        is_layer = is_adapted(module) or not any(True for _ in module.children())
        if planned is None and place is not None and not is_layer:
            options = module, trusted, verifies, weights
            kept = next((f for f in former if (f.module, f.trusted, f.verifies, f.weights) == options), None)
            own_entry = place in vars(module)
            made = kept or PlannedForward(module, trusted, own_entry, method, None, verifies, weights=weights)
            made.put(place)
        if PlannedForward.of(module) is not None and not takes_adapters(list(module.modules())):
            stop_checking([module])  # the ``PlannedForward`` compares the code


def _set_planners(root: nn.Module, maker: Maker | None, kind: Kind, is_transformer: bool) -> set[nn.Module]:
    """Do ``_set_planner`` for all graphs in ``root``. Returns the modules that must get no other plans."""
    found: set[nn.Module] = set()
    for _, module in outermost(root):
        is_required = is_transformer and module is root
        if (graphed := GraphedForward.of(module)) is not None:
            # A graph would not compare plans of modules in it, where it is captured from the module's code.
            found.update((module,) if is_required or graphed.method != "forward" else module.modules())
            _set_planner(module, graphed, maker, kind, is_required=is_required)
    return found


def _set_planner(
    module: nn.Module,
    graphed: GraphedForward,
    maker: Maker | None,
    kind: Kind,
    *,
    is_required: bool,
) -> None:
    """Let ``graphed`` run plans where ``module`` runs no fused blocks. ``maker``: None for no plans.

    ``kind``: the ``Kind`` of its model.
    """
    planner, modules = None, list(module.modules())
    has_plans = any(isinstance(m, CONVOLUTIONS) for m in modules)
    if maker is not None and is_required:
        planner = Planner(maker, is_always=True, is_required=True)
    elif maker is not None and has_plans:
        own = set(modules)
        inner = [finding for finding in kind.findings if finding.module in own]
        is_planned = bool(_blocks(inner)) or is_convolutional(modules)
        maker = replace(maker, is_captured=True)
        planner = Planner(maker, is_planned and not _is_faster_fused(modules, inner))
    if planner != graphed.planner:
        graphed.clear()
        graphed.set_planner(planner)


@dataclass(frozen=True)
class Maker:
    """Makes a ``PlannedForward`` that a ``GraphedForward`` runs."""

    trusted: frozenset[str]
    verifies: bool
    is_captured: bool = False
    weights: RowWeights | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Maker, (self.trusted, self.verifies, self.is_captured)  # a copy has no weights in E4M3

    def __call__(self, module: nn.Module, method: str, states: States) -> PlannedForward:
        options = {"method": method, "states": states, **vars(self)}
        return PlannedForward(module, **options)


def remove(root: nn.Module) -> None:
    """Undo ``install``: remove each ``PlannedForward`` in ``root``, and drop its plans."""
    for planned in take_off(root):
        planned.clear()


def take_off(root: nn.Module) -> list[PlannedForward]:
    """Remove each ``PlannedForward`` in ``root``, and return it with its plans."""
    found = [planned for module in root.modules() for planned in PlannedForward.all_of(module)]
    for planned in found:
        planned.take_off()
    return found


def inspect(root: nn.Module, prefix: str = "", kind: Kind | None = None) -> Iterator[Planned]:
    """Yields a ``Planned`` for each module in ``root`` that has plans, or gets them from ``optimize``.

    ``kind``: as in ``install``.
    """
    found = [
        (path, module, planned)
        for path, module in root.named_modules(prefix=prefix)
        if (planned := PlannedForward.of(module)) is not None
    ]
    for each in found:
        yield described(*each)
    is_on = bool(found)
    for path, module in outermost(root, prefix):
        if (graphed := GraphedForward.of(module)) is not None:
            planner = graphed.planner
            is_on |= planner is not None and planner.is_always
            waiting = [None] if planner is not None and planner.is_required else []  # not called yet
            for planned in graphed.planned or waiting:
                yield described(path, module, planned)
    if is_on:
        return
    kind = kind or kind_of_model(root)
    if kind.gets_plans:
        reasons = {"it is compiled by torch.compile": 0} if is_compiled(root) else {}
        reason = kind.why_not
        yield Planned(prefix, type(root).__name__, False, own=reasons | ({reason: 0} if reason else {}))


def described(path: str, module: nn.Module, planned: PlannedForward | None) -> Planned:
    """What the report says about ``planned``, the plans of ``module``. None: it has none yet."""
    plans = [] if planned is None else planned.plans
    steps = [step for plan in plans for step in plan.steps]
    sizes: Counter[str] = Counter()
    for plan in plans:
        for step in plan.steps:
            sizes[step.kind] += plan.runs * (step.read + step.written)
    return Planned(
        path,
        type(module).__name__,
        True,
        len(plans),
        planned.calls if planned else 0,
        planned.traces if planned else 0,
        dict(Counter(step.target for step in steps).most_common()),
        sizes["kernel"],
        sizes.total(),
        dict(planned.own) if planned else {},
        planned.last_change if planned else "",
    )
