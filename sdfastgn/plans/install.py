"""Turns plans on and off for the models that get them.

To turn plans on, ``install`` puts a ``PlannedForward`` under the key "forward" into the ``__dict__`` of a
module. In models that accelerate offloads as a whole, the key is "_old_forward".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from sdfastgn.kernels.common.private import is_compiled
from sdfastgn.patches import patcher
from sdfastgn.patches.code.checked import entrances, stop_checking
from sdfastgn.patches.code.states import States
from sdfastgn.patches.fp8 import models as fp8
from sdfastgn.patches.fp8.rows import RowWeights
from sdfastgn.patches.graphs.forward import GraphedForward, Planner
from sdfastgn.patches.graphs.install import graphed_of, outermost, place_in, set_mode
from sdfastgn.patches.graphs.models import is_graphable, numbers_of, takes_gigabytes
from sdfastgn.patches.layout.left_alone import reason_of_cudnn
from sdfastgn.patches.lora.adapters import is_adapted, takes_adapters
from sdfastgn.patches.swap.class_forward import class_forward, replace_kept
from sdfastgn.patches.swap.instance_entries import guard, unguard
from sdfastgn.patches.swap.tested_sources import Untested
from sdfastgn.plans.forward import PlannedForward
from sdfastgn.plans.inside import CONVOLUTIONS
from sdfastgn.plans.rewrite.e4m3 import FEWEST_COLUMNS

__all__ = [
    "Planned",
    "fused_blocks_pay",
    "gets_plans",
    "inspect",
    "install",
    "is_convolutional",
    "remove",
    "take_off",
    "trusted_in",
    "weights_in_rows",
]

# Fusions of layers that occur in models of all kinds. Any other fusion is one of blocks.
_OF_LAYERS = ("group_norm", "group_norm_subclass", "sequential", "attention", "conv_norm_out")
# Keys in the ``__dict__`` of a module under which a ``PlannedForward`` may be.
_PLACES = ("forward", "_old_forward")
# Smallest share of a model's weights that must be in convolutions of images and videos, or in linear layers
# of a transformer with adaptive norms. Kernels exist for what surrounds these. A model of other layers gains
# too little to pay for a trace.
_SHARE = 0.5
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
        calls: number of calls whose result came from a plan.
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


def gets_plans(root: nn.Module) -> bool:
    """True if ``optimize`` gives ``root`` plans: kernels exist for its norms, and it has no fused blocks."""
    if any(_planned(module) is not None for module in entrances(root)):
        return True
    gains = is_convolutional(root) or _has_adaptive_norms(root)
    return gains and not fused_blocks_pay(root, _blocks_in(root))


def is_convolutional(root: nn.Module) -> bool:
    """True if ``root`` has norms, and most of its weights are in convolutions."""
    return _has_most_weights(root, CONVOLUTIONS) and any(map(_is_norm, root.modules()))


def weights_in_rows(root: nn.Module) -> list[Tensor]:
    """The weights of linear layers that plans of ``root`` may read in E4M3. Empty if it is no transformer."""
    if not (_has_adaptive_norms(root) and gets_plans(root)):
        return []
    weights = [m.weight for m in root.modules() if isinstance(m, nn.Linear)]
    return [weight for weight in weights if min(weight.shape) >= FEWEST_COLUMNS]


def _has_adaptive_norms(root: nn.Module) -> bool:
    """True if ``root`` is a transformer with norms without parameters, which its code modulates.

    Its only convolutions cut an image or video into patches, and no graphs are made of its own code.
    """
    if (
        not any(map(_is_norm_without_parameters, root.modules()))
        or not _has_most_weights(root, (nn.Linear,))
        or any(map(is_graphable, root.modules()))
    ):
        return False
    convolutions = [m for m in root.modules() if isinstance(m, _ConvNd)]
    return all(m.kernel_size == m.stride for m in convolutions)


def _is_called_each_step(root: nn.Module) -> bool:
    """True if ``root`` is a UNet or ControlNet of images, in which Python takes longer than the GPU.

    UNets of videos are slower as plans.
    """
    convolutions = [m for m in root.modules() if isinstance(m, _ConvNd)]
    is_of_images = all(isinstance(m, nn.Conv2d) for m in convolutions) and not takes_gigabytes(root)
    return bool(numbers_of(root) and convolutions) and is_of_images


def _has_most_weights(root: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """True if more than ``_SHARE`` of the weights of ``root`` are in layers of ``kinds``."""
    if any(is_lazy(parameter) for parameter in root.parameters()):
        return False  # the first call makes its weights
    weights = sum(parameter.numel() for parameter in root.parameters())
    layers: list[Any] = [m for m in root.modules() if isinstance(m, kinds)]
    return sum({id(m.weight): m.weight.numel() for m in layers}.values()) > _SHARE * weights


def _is_norm_without_parameters(module: nn.Module) -> bool:
    """True if ``module`` may be a norm of whatever class: a leaf without parameters, but with an eps."""
    is_leaf = not any(True for _ in module.children()) and not any(True for _ in module.parameters())
    return is_leaf and isinstance(vars(module).get("eps"), float)


def _is_norm(module: nn.Module) -> bool:
    """True if ``module`` may be a norm of whatever class: all its weights are of channels, or it has none."""
    sizes = [(parameter.numel(), max(parameter.shape, default=0)) for parameter in module.parameters()]
    if not sizes:
        return _is_norm_without_parameters(module)
    return all(count == largest > 1 for count, largest in sizes)


def _blocks_in(root: nn.Module) -> list[patcher.Finding]:
    """The findings about fused blocks: all but those about layers that occur in models of all kinds."""
    return [finding for finding in patcher.inspect(root) if finding.fusion.name not in _OF_LAYERS]


def fused_blocks_pay(root: nn.Module, blocks: Sequence[patcher.Finding]) -> bool:
    """True if ``root`` is faster by the fused ones of ``blocks`` than by plans.

    Plans need no known code. So it is faster by plans if more than a little of the convolutions is in unknown
    blocks. It also is if most convolutions are in no block, such as those over time of some autoencoders.
    """
    if not any(
        finding.status == "fusable" or finding.fusion.is_applied(finding.module) for finding in blocks
    ):
        return False
    inside: dict[Any, bool] = {}  # convolution -> whether its innermost block is unknown
    for finding in sorted(blocks, key=lambda finding: -sum(1 for _ in finding.module.modules())):
        is_unknown = isinstance(finding.reason, Untested)
        inside.update((m, is_unknown) for m in finding.module.modules() if isinstance(m, CONVOLUTIONS))
    sizes = {m: m.weight.numel() for m in root.modules() if isinstance(m, CONVOLUTIONS)}
    total, within = sum(sizes.values()), sum(sizes[m] for m in inside)
    unknown = sum(sizes[m] for m, is_unknown in inside.items() if is_unknown)
    return unknown <= _UNKNOWN * total and within >= _SHARE * total


def trusted_in(root: nn.Module) -> frozenset[str] | None:
    """The packages that plans in ``root`` trust; None if no module in ``root`` has plans."""
    found = [planned.trusted for module in root.modules() if (planned := _planned(module)) is not None]
    for _, module in outermost(root):
        graphed = graphed_of(module)
        maker = graphed.planner.make if graphed is not None and graphed.planner is not None else None
        found += [maker.trusted] if isinstance(maker, _Maker) else []
    return frozenset().union(*found) if found else None


def install(
    root: nn.Module,
    is_on: bool,
    trusted: frozenset[str] = frozenset(),
    cuda_graphs: str | bool = False,
    *,
    verifies: bool = False,
    former: Sequence[PlannedForward] = (),
) -> None:
    """Give ``root`` and its children a ``PlannedForward`` each, if ``root`` gets plans. Else remove them.

    A pipeline may call the children of a model by themselves: an autoencoder's ``decode`` calls its decoder.
    A module with CUDA graphs gets a ``Planner`` instead. ``cuda_graphs``: the mode of the graphs that a
    transformer gets with its plans. ``former``: what ``take_off`` has returned, with its plans.
    """
    weights = fp8.row_weights(root)
    has_fp8 = fp8.is_allowed(root) and weights is None  # plans have no products with learned scales
    can_have = is_on and not has_fp8 and reason_of_cudnn(root.modules()) is None
    has_plans = can_have and gets_plans(root)
    is_transformer = (has_plans or graphed_of(root) is not None) and _has_adaptive_norms(root)
    if is_transformer and has_plans:
        if cuda_graphs is not False and graphed_of(root) is None:
            former = [*former, *take_off(root)]  # graphs take the place of the plans of ``root``
        set_mode(root, cuda_graphs)
    elif is_transformer:
        set_mode(root, False)
    graphed_modules = set()
    for _, module in outermost(root):
        for graphed in GraphedForward.of(module):
            graphed_modules.add(module)
            maker = _Maker(trusted, verifies, weights=weights) if is_on else None
            _set_planner(module, graphed, maker, is_required=is_transformer and module is root)
    if not has_plans and not (can_have and not graphed_modules and _is_called_each_step(root)):
        remove(root)
        return
    for module in root.modules():  # also those that have plans because of a boundary
        planned = _planned(module)
        own = None if planned is None else (planned.trusted, planned.verifies, planned.weights)
        if own is not None and own != (trusted, verifies, weights):
            _take_off(module).clear()
    for module in entrances(root):
        planned = _planned(module)
        # A plan would not run the graphs of the modules in it.
        place = place_in(module) if graphed_modules.isdisjoint(module.modules()) else None
        is_layer = is_adapted(module) or not any(True for _ in module.children())
        if planned is None and place in _PLACES and not is_layer:
            options = module, trusted, verifies, weights
            kept = next((f for f in former if (f.module, f.trusted, f.verifies, f.weights) == options), None)
            vars(module)[place] = kept or PlannedForward(
                module, trusted, place in vars(module), verifies=verifies, weights=weights
            )
            guard(module)
        if _planned(module) is not None and not takes_adapters(module):
            stop_checking([module])  # the ``PlannedForward`` compares the code


def _set_planner(module: nn.Module, graphed: GraphedForward, maker: _Maker | None, is_required: bool) -> None:
    """Let ``graphed`` run plans where ``module`` runs no fused blocks. ``maker``: None for no plans."""
    planner = None
    # Another method than ``forward`` is a loop over frames that keeps state. The children that it calls have
    # plans, which serve any number of frames.
    has_plans = graphed.method == "forward" and any(isinstance(m, CONVOLUTIONS) for m in module.modules())
    if maker is not None and is_required:
        planner = Planner(maker, is_always=True, is_required=True)
    elif maker is not None and has_plans:
        blocks = _blocks_in(module)
        is_planned = bool(blocks) or is_convolutional(module)
        maker = replace(maker, is_captured=True)
        planner = Planner(maker, is_planned and not fused_blocks_pay(module, blocks))
    if planner != graphed.planner:
        graphed.clear()
        graphed.set_planner(planner)


@dataclass(frozen=True)
class _Maker:
    """Makes a ``PlannedForward`` that a ``GraphedForward`` runs."""

    trusted: frozenset[str]
    verifies: bool
    is_captured: bool = False
    weights: RowWeights | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Maker, (self.trusted, self.verifies, self.is_captured)  # a copy has no weights in E4M3

    def __call__(self, module: nn.Module, method: str, states: States) -> PlannedForward:
        options = {"method": method, "states": states, **vars(self)}
        return PlannedForward(module, **options)


def remove(root: nn.Module) -> None:
    """Undo ``install``: remove each ``PlannedForward`` in ``root``, and drop its plans."""
    for planned in take_off(root):
        planned.clear()


def take_off(root: nn.Module) -> list[PlannedForward]:
    """Remove each ``PlannedForward`` in ``root``, and return it with its plans."""
    return [_take_off(module) for module in root.modules() if _planned(module) is not None]


def inspect(root: nn.Module, prefix: str = "") -> Iterator[Planned]:
    """Yields a ``Planned`` for each module in ``root`` that has plans, or gets them from ``optimize``."""
    found = [
        (path, module) for path, module in root.named_modules(prefix=prefix) if _planned(module) is not None
    ]
    for path, module in found:
        yield _described(path, module, _planned(module))
    for path, module in outermost(root, prefix):
        for graphed in GraphedForward.of(module):
            planner = graphed.planner
            waiting = [None] if planner is not None and planner.is_required else []  # not called yet
            for planned in graphed.planned or waiting:
                yield _described(path, module, planned)
    if not found and gets_plans(root):
        reasons = {"it is compiled by torch.compile": 0} if is_compiled(root) else {}
        reason = reason_of_cudnn(root.modules())
        yield Planned(prefix, type(root).__name__, False, own=reasons | ({reason: 0} if reason else {}))


def _described(path: str, module: nn.Module, planned: PlannedForward | None) -> Planned:
    plans = [] if planned is None else planned.plans
    steps = [step for plan in plans for step in plan.steps]
    sizes: Counter[str] = Counter()
    for step in steps:
        sizes[step.kind] += step.read + step.written
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


def _planned(module: nn.Module) -> PlannedForward | None:
    for name in _PLACES:
        value = vars(module).get(name)
        if isinstance(value, PlannedForward):
            return value
    return None


def _take_off(module: Any) -> PlannedForward:
    planned: Any = _planned(module)
    own = class_forward(module)
    if vars(module).get("forward") is planned and not planned.replaces_entry:
        del vars(module)["forward"]
    # A hook of another library may have kept ``planned`` in order to restore it later.
    replace_kept(module, planned, own)
    unguard(module)
    return planned
