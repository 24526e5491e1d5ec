"""Decides which models run as plans, and turns plans on and off.

A plan is a traced call as a list of kernel calls, which run without the model's Python. To turn plans on,
``install`` puts a ``PlannedForward`` under the key "forward" into the ``__dict__`` of a module. In some
autoencoders another method is replaced (``method_of``). In models that accelerate offloads as a whole, the
key is the one under which accelerate's hook keeps the old ``forward`` (``place_in``).
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

# Names of the fusions that replace single layers, which occur in models of all kinds. A fusion gives modules
# of a class a faster ``forward``. All other fusions replace whole blocks of a model.
_OF_LAYERS = ("group_norm", "group_norm_subclass", "sequential", "attention", "conv_norm_out")
# Names of fusions of blocks that autoencoders have, and some UNets too. If a model with such blocks takes no
# timestep, it is an encoder or decoder. It then runs as plans, which are as fast there as fused blocks.
_OUTSIDE_UNETS = (
    *("conv_norm_out", "decoder_slices"),  # "decoder_slices" is the only fusion in MoVQ's decoder
    *("temporal_resnet_block", "spatio_temporal_res_block"),
)
# A model gets plans only if more than this share of its weights is in convolutions, or in linear layers of a
# transformer. This package has kernels for what surrounds such layers: norms, activations and sums. A model
# of other layers gains too little to make up for the time of a trace.
_SHARE = 0.5
# A model with a timestep as argument counts as a transformer only if convolutions have at most this number of
# weights for each weight in linear layers. Convolutions that cut an image or video into patches do not count.
# A model without a timestep must have no other convolutions at all.
_MIXING = 0.1
# Names under which the ``forward`` of denoisers takes the timestep.
_TIMES = frozenset(("timestep", "timesteps", "t"))
# Blocks with code that sdfastgn was never tested with cannot be fused. If they have more than this share of
# the weights of all convolutions, the whole model runs as plans, which are about as fast as fused blocks.
_UNKNOWN = 0.1


@dataclass(frozen=True)
class Planned:
    """What the report says about the plans of one module.

    A plan is a traced call as a list of steps: calls of kernels and of PyTorch's ops.

    Attributes:
        path: the module's dotted path.
        kind: the name of the module's class.
        is_on: False if the module has no plans now, but would get them from ``optimize``.
        plans: number of plans that exist now.
        calls: number of calls whose result came from a plan that ran without a CUDA graph.
        traces: number of traces so far.
        steps: for the name of each kernel or op, the number of its calls in all plans together.
        kernel_bytes: bytes that this package's kernels read and write in one run of each plan.
        bytes: bytes that all steps read and write in one run of each plan.
        own: for each reason, the number of calls that ran the model's own code because of it.
        last_change: says in words which change of the model made its plans invalid last. Empty if there was
            none.
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
        """True if the module was called. Calls during the capture of a CUDA graph count."""
        return bool(self.plans or self.calls or self.own)


@dataclass(frozen=True)
class Kind:
    """Says whether a model gains by plans, and what plans can do for it. ``kind_of`` makes it.

    A plan is a traced call that runs without the model's Python.

    Attributes:
        findings: for the modules in the model, whether a fused block can replace them.
        gains: True if the model is faster with plans: it is a convolutional model or a transformer, and
            fused blocks would not make it faster still.
        has_plans: True if the model has plans now.
        is_transformer: True if most weights are in linear layers, and nearly all convolutions only cut an
            image or video into patches. The model must also take a timestep, or have norms without
            parameters, as in transformers that modulate norms by an embedding. Models whose own code may be
            captured as CUDA graphs, such as UNets, do not count.
        is_called_each_step: True if the model is a UNet or ControlNet of images. It is called in each
            denoising step, and its Python takes longer than the GPU. UNets of videos do not count, because
            they are slower as plans.
        in_rows: the weights of linear layers that its plans may read in E4M3, an 8-bit float dtype. Empty if
            it is no transformer.
        why_not: why the model gets no plans even if ``gains`` is True. None if there is no such reason.
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
        """True if ``optimize`` lets calls of the model run as plans."""
        return self.gains or self.has_plans


def kind_of(modules: Sequence[nn.Module], findings: Iterable[patcher.Finding]) -> Kind:
    """Find out whether a model gains by plans, and why not if it does not.

    ``modules``: the model and all modules in it. ``findings``: for these modules, whether a fused block can
    replace them.
    """
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
    """True if ``optimize`` lets calls of the model ``root`` run as plans."""
    return kind_of_model(root).gets_plans


def kind_of_model(root: nn.Module) -> Kind:
    named = list(root.named_modules())
    return kind_of([module for _, module in named], patcher.inspect_model(named))


def has_plans_now(root: nn.Module) -> bool:
    return any(PlannedForward.of(module) is not None for module in entrances(root))


def is_convolutional(modules: Sequence[nn.Module]) -> bool:
    """True if the model that consists of ``modules`` has norms, and most weights in convolutions."""
    return _has_most_weights(modules, CONVOLUTIONS) and any(map(_is_norm, reversed(modules)))


def _is_transformer(modules: Sequence[nn.Module]) -> bool:
    """True if a model consists mostly of linear layers and is a denoiser, or has norms without parameters.

    Text encoders are left out by this: their norms have parameters. ``Kind.is_transformer`` says more.
    """
    takes_time = _takes_time(modules[0])
    if not (takes_time or any(map(_is_norm_without_parameters, modules))):
        return False
    if any(map(is_graphable, modules)) or not _has_most_weights(modules, (nn.Linear,)):
        return False
    linear, convolutions = (_weights(modules, (kind,)).items() for kind in (nn.Linear, _ConvNd))
    mixing = sum(weight.numel() for m, weight in convolutions if m.kernel_size != m.stride)
    return mixing <= (_MIXING if takes_time else 0) * sum(weight.numel() for _, weight in linear)


def _takes_time(root: nn.Module) -> bool:
    """True if the ``forward`` of ``root`` takes a timestep, as denoisers do."""
    forward = getattr(type(root), "forward", None)  # classes of torch.jit's modules have no ``forward``
    return forward is not None and not _TIMES.isdisjoint(signature(forward).parameters)


def _is_called_each_step(modules: Sequence[nn.Module]) -> bool:
    """True if the model is a UNet or ControlNet of images: all its convolutions are ``nn.Conv2d``."""
    convolutions = [m for m in modules if isinstance(m, _ConvNd)]
    is_of_images = all(isinstance(m, nn.Conv2d) for m in convolutions) and not takes_gigabytes(modules[0])
    return bool(numbers_of(modules[0]) and convolutions) and is_of_images


def _blocks(findings: Iterable[patcher.Finding]) -> list[patcher.Finding]:
    return [finding for finding in findings if finding.fusion.name not in _OF_LAYERS]


def _is_faster_fused(modules: Sequence[nn.Module], findings: Sequence[patcher.Finding]) -> bool:
    """True if fused blocks make the model that consists of ``modules`` faster than plans do.

    ``findings``: for its modules, whether a fused block can replace them.
    """
    is_outside_unets = not _takes_time(modules[0]) and any(
        finding.fusion.name in _OUTSIDE_UNETS for finding in findings
    )
    return not is_outside_unets and fused_blocks_pay(modules, _blocks(findings))


def _has_most_weights(modules: Sequence[nn.Module], kinds: tuple[type[nn.Module], ...]) -> bool:
    """True if more than half of the weights of ``modules`` (``_SHARE``) are in layers of ``kinds``."""
    parameters = {p for module in modules for p in module._parameters.values() if p is not None}
    if any(map(is_lazy, parameters)):
        return False  # weights cannot be counted: lazy parameters have no sizes before the first call
    weights = sum(parameter.numel() for parameter in parameters)
    inside = {id(weight): weight.numel() for weight in _weights(modules, kinds).values()}
    return sum(inside.values()) > _SHARE * weights


def _weights(modules: Iterable[nn.Module], kinds: tuple[type[nn.Module], ...]) -> dict[nn.Module, Tensor]:
    """For each layer of the classes ``kinds`` in ``modules``: its weight. Layers without one are left out."""
    found = {m: getattr(m, "weight", None) for m in modules if isinstance(m, kinds)}
    return {m: weight for m, weight in found.items() if isinstance(weight, Tensor)}


def _is_norm_without_parameters(module: nn.Module) -> bool:
    """True if ``module`` is probably a norm: it has an attribute eps, no parameters and no children."""
    if not isinstance(vars(module).get("eps"), float):
        return False
    return not any(True for _ in module.children()) and not any(True for _ in module.parameters())


def _is_norm(module: nn.Module) -> bool:
    """True if ``module`` is probably a norm: each of its parameters has just one number for each channel.

    Modules without parameters count if they have an attribute eps and no children.
    """
    sizes = [(parameter.numel(), max(parameter.shape, default=0)) for parameter in module.parameters()]
    if not sizes:
        return _is_norm_without_parameters(module)
    return all(count == largest > 1 for count, largest in sizes)


def fused_blocks_pay(modules: Iterable[nn.Module], blocks: Sequence[patcher.Finding]) -> bool:
    """True if fused ``blocks`` make the model that consists of ``modules`` faster than plans do.

    Blocks with code that was never tested cannot be fused, but they can be traced. So plans are faster if
    such blocks have more than a tenth of the weights of convolutions. They are also faster if blocks have
    less than half of these weights, as in some autoencoders that have convolutions over time beside the
    blocks.
    """
    if not any(
        finding.status == "fusable" or finding.fusion.is_applied(finding.module) for finding in blocks
    ):
        return False
    sizes = {m: weight.numel() for m, weight in _weights(modules, CONVOLUTIONS).items()}
    inside: dict[nn.Module, bool] = {}  # convolution -> True if its innermost block has untested code
    found = [(list(finding.module.modules()), isinstance(finding.reason, Untested)) for finding in blocks]
    for block, is_unknown in sorted(found, key=lambda each: -len(each[0])):
        inside.update((m, is_unknown) for m in block if m in sizes)
    total, within = sum(sizes.values()), sum(sizes[m] for m in inside)
    unknown = sum(sizes[m] for m, is_unknown in inside.items() if is_unknown)
    return unknown <= _UNKNOWN * total and within >= _SHARE * total


def trusted_in(modules: Iterable[nn.Module]) -> frozenset[str] | None:
    """Returns the packages that the user trusts for plans of ``modules``: their code keeps no state.

    None if none of the modules has plans.
    """
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
    """Let calls of ``root`` and of its children run as plans, if the model gains by it. Else remove plans.

    A plan is a traced call that runs without the model's Python. Children get plans of their own, because a
    pipeline may call them by themselves: an autoencoder's ``decode`` calls its decoder. If a module already
    has an object that makes CUDA graphs of its calls, that object gets plans to capture (a ``Planner``).

    Args:
        root: the model.
        is_on: False removes all plans.
        trusted: names of packages of which the user has said that their code keeps no state between calls.
        cuda_graphs: the mode of the CUDA graphs that a transformer gets together with its plans.
        verifies: True compares the first result of each new plan with that of the module's own code.
        former: objects that ``take_off`` has returned. They are used again, with their plans, where they fit.
        kind: the ``Kind`` of ``root``. If it is None, this function finds it out.
    """
    kind = kind_of_model(root) if kind is None else kind
    weights = fp8.row_weights(root)
    # Fused blocks have FP8 products whose scales are learned from calls. Plans have none of these, so a model
    # that uses them gets no plans.
    has_fp8 = fp8.is_allowed(root) and weights is None
    can_have = is_on and not has_fp8 and kind.why_not is None
    # A model that does not gain by plans keeps those that it has. But if calls of its modules may become CUDA
    # graphs, these take the place of the plans.
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
    # Set the options of all plans: modules inside have plans if the model cannot be traced (``inside.py``).
    for module in root.modules():
        if (planned := PlannedForward.of(module)) is None:
            continue
        planned.set_options(trusted, verifies, weights)
        if not in_graphs.isdisjoint(module.modules()):
            planned.take_off()  # a plan of this module would bypass CUDA graphs of inner modules
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
            stop_checking([module])  # from now on only its ``PlannedForward`` looks for replaced functions


def _set_planners(root: nn.Module, maker: Maker | None, kind: Kind, is_transformer: bool) -> set[nn.Module]:
    """Let all modules in ``root`` whose calls become CUDA graphs capture plans, where these are faster.

    Returns the modules that must not also run as plans without a CUDA graph, by a ``PlannedForward``.
    """
    found: set[nn.Module] = set()
    for _, module in outermost(root):
        is_required = is_transformer and module is root
        if (graphed := GraphedForward.of(module)) is not None:
            # Modules in ``module`` get no plans if a CUDA graph may be captured from its own code: the graph
            # would not notice that such plans have become invalid.
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
    """Let ``graphed`` capture plans instead of the module's code, if fused blocks are not faster.

    Args:
        module: the module whose calls become CUDA graphs.
        graphed: the object that captures and replays them.
        maker: makes the object that runs calls as plans. None removes plans.
        kind: what is known about the whole model.
        is_required: True if calls without a plan must not be captured.
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
    """Makes the ``PlannedForward`` whose plans a ``GraphedForward`` captures as CUDA graphs.

    The attributes are arguments of ``PlannedForward``.
    """

    trusted: frozenset[str]
    verifies: bool
    is_captured: bool = False
    weights: RowWeights | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The weights in E4M3 belong to the original model, so a copied ``Maker`` has none.
        return Maker, (self.trusted, self.verifies, self.is_captured)

    def __call__(self, module: nn.Module, method: str, states: States) -> PlannedForward:
        options = {"method": method, "states": states, **vars(self)}
        return PlannedForward(module, **options)


def remove(root: nn.Module) -> None:
    """Undo ``install``: let all modules in ``root`` run their own code again, and drop all plans."""
    for planned in take_off(root):
        planned.clear()


def take_off(root: nn.Module) -> list[PlannedForward]:
    """Let all modules in ``root`` run their own code again. Returns the objects that ran the plans.

    The objects keep their plans, and ``install`` can use them again.
    """
    found = [planned for module in root.modules() for planned in PlannedForward.all_of(module)]
    for planned in found:
        planned.take_off()
    return found


def inspect(root: nn.Module, prefix: str = "", kind: Kind | None = None) -> Iterator[Planned]:
    """Yields what the report says about each module in ``root`` that has plans.

    If there is none, but ``optimize`` would give the model plans, it yields one item for ``root``.

    ``prefix``: the dotted path of ``root``. ``kind``: the ``Kind`` of ``root``; None: it is found here.
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
            # None stands for the plans of a module that was not called yet.
            waiting = [None] if planner is not None and planner.is_required else []
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
    """What the report says about the plans of ``module``, which is at the dotted path ``path``.

    ``planned``: the object that runs the plans; None if the module was not called yet.
    """
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
