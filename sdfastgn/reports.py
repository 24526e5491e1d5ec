"""The report on a pipeline, as data, text or HTML: what is fused, what can be fused, and what is skipped."""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdfastgn.patches.fp8.models import Fp8
    from sdfastgn.patches.graphs.install import Graphs
    from sdfastgn.patches.lora.merging import Merged
    from sdfastgn.plans.install import Planned

# Number of characters in a line of the printed report: the width of the narrowest usual terminal.
WIDTH = 80
# Maximum number of paths that a report prints for each reason to skip modules. ``details`` prints all paths.
_SHOWN_PATHS = 3
# Maximum number of kinds of steps that a report prints for the plans of a module. A plan is a traced list of
# kernels, its steps, that replaces the Python of the module's forward.
_SHOWN_STEPS = 6
# Classes of models that gain most of their speed from CUDA graphs: without graphs, launching their kernels
# from Python takes longer than running them ("sdfastgn without graphs" in docs/benchmarks.md).
_UNETS = ("UNet2DModel", "UNet2DConditionModel")
# Ends of reasons why a call ran without a CUDA graph. The report warns of a UNet whose calls ran without
# graphs, but not if the reason of each call ends in one of these texts. There are two cases. Either later
# calls may run as graphs: after the first call, or the first six calls of an offloaded model, or once FP8's
# scales are known. Or the user does something that excludes graphs: training, or a compiled or traced call.
_NO_LOSS = (
    "first call of its kind",
    "a capture takes as long as several calls",
    "gradients are enabled",
    "is in training mode",
    "is compiled by torch.compile",
    "the call is traced or transformed",
    "the scales of its FP8 products are not known yet",
    "scales of its FP8 products have grown, and are compared with fp32",
)
STATUSES = ("fused", "fusable", "skipped")


@dataclass(frozen=True)
class Entry:
    """One row of the report: whether a module is fused, can be fused or is skipped.

    ``component``: the name of the pipeline's component, or the class of a single model. ``path``: the
    module's dotted path in the pipeline or model. ``fusion``: the fusion's name. ``kind``: the name of the
    module's class. ``status``: one of ``STATUSES``. ``reason``: why the module is skipped; empty if it is
    not skipped.
    """

    component: str
    path: str
    fusion: str
    kind: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Left:
    """A model that sdfastgn makes no faster.

    ``path``: the model's name in the pipeline; empty if it is in no pipeline. ``kind``: the name of the
    model's class. ``reason``: why the model has no fused modules, no CUDA graphs, and no plans (traced lists
    of kernels).
    """

    path: str
    kind: str
    reason: str


@dataclass(frozen=True, repr=False)
class Report:
    """What is fused in a pipeline or module. ``print(report)`` prints a summary.

    ``report.details()`` returns the whole text. The attributes have its content as numbers and lists.

    ``backend``: says whether fused modules run Triton kernels or their original code, on the present device
    of the weights. For weights on the meta device it is empty if this machine has a GPU.
    ``channels_last_weights``: number of convolutions whose weights ``optimize`` has made channels-last.
    ``layout_copies_removed``: number of copies from channels-last to channels-first that the original model
    makes in each call, and that the optimized model does not make. ``runs_kernels``: False if all components
    run their original code now. Then the modules in ``fused`` do so too, for example until the model is moved
    to a GPU. ``graphs``: the state of each module whose calls can run as CUDA graphs.
    ``graph_memory_bytes``: size in bytes of the memory pools that contain the graphs. The pools may also
    contain graphs of other models in the process. ``merged``: the models with layers whose LoRA adapters are
    merged into weights. ``fp8``: the models with matrix products in FP8. ``offloaded``: names of the models
    that are offloaded by ``enable_model_cpu_offload``, and whose large weights sdfastgn moves faster.
    ``without_kernels``: the operations of this process that run in plain PyTorch, because Triton could not
    compile their kernels, each with the reason. ``plans``: the state of each module whose calls can run as
    plans, which are traced lists of kernels. ``left``: the models that sdfastgn makes no faster.
    """

    entries: tuple[Entry, ...]
    backend: str
    channels_last_weights: int
    layout_copies_removed: int
    graphs: tuple[Graphs, ...] = ()
    graph_memory_bytes: int = 0
    runs_kernels: bool = True
    merged: tuple[Merged, ...] = ()
    fp8: tuple[Fp8, ...] = ()
    offloaded: tuple[str, ...] = ()
    without_kernels: dict[str, str] = field(default_factory=dict)
    plans: tuple[Planned, ...] = ()
    left: tuple[Left, ...] = ()

    @property
    def fused(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.status == "fused")

    @property
    def fusable(self) -> tuple[Entry, ...]:
        """Entries of modules that are not fused now, but which ``optimize`` would fuse."""
        return tuple(e for e in self.entries if e.status == "fusable")

    @property
    def skipped(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.status == "skipped")

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict that ``json.dumps`` accepts."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"<sdfastgn report: {self._summary()}; print it for more>"

    def __str__(self) -> str:
        return "\n".join(self._lines(_SHOWN_PATHS))

    def details(self) -> str:
        """Returns the whole report as text: summary, skipped modules, and a table of all fusions."""
        rows = self._counts()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = []
        for row in rows:
            names, counts = row[:2], row[2:]
            cells = [name.ljust(width) for name, width in zip(names, widths[:2], strict=True)]
            cells += [count.rjust(width) for count, width in zip(counts, widths[2:], strict=True)]
            table.append("  ".join(cells))
        table.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*self._lines(len(self.entries)), "", *table])

    def _repr_html_(self) -> str:
        """Returns the whole report as HTML tables, which notebooks show."""
        titles, *rows = self._counts()
        header = "".join(f"<th>{name}</th>" for name in titles)
        counts = "".join(_html_row(row) for row in rows)
        found = self._paragraphs(len(self.entries))
        details = "".join(_html_row((title, "; ".join(more))) for title, more in found)
        summary = html.escape(f"sdfastgn: {self._summary()}")
        return f"<p><b>{summary}</b></p><table>{details}</table><table><tr>{header}</tr>{counts}</table>"

    def _summary(self) -> str:
        parts = [f"{parts_text(self.fused)} {self._fused_where()}"] if self.fused else []
        if self.fused and not self.runs_kernels:
            parts.append("none here")
        if self.fusable:
            parts.append(f"optimize would fuse {parts_text(self.fusable)}")
        alive, replays = (sum(getattr(g, name) for g in self.graphs) for name in ("alive", "replays"))
        none = "none yet" if self._graphable() else "none"
        graphs = f"{alive} alive, {replays} calls replayed" if alive or replays else none
        left = f", {_models_text(len(self.left))} at stock's speed" if self.left else ""
        states = f"{len(self.skipped)} skipped{left}, graphs: {graphs}{self._plans_summary()}"
        return f"{', '.join(parts) or 'nothing to fuse'}, {states}"

    def _plans_summary(self) -> str:
        """Returns the end of the report's summary: how many plans exist. Empty if no module gets plans.

        A plan is a traced list of kernels that replaces the Python of a module's forward.
        """
        if not self.plans:
            return ""
        plans, calls = sum(p.plans for p in self.plans), sum(p.calls for p in self.plans)
        if plans or calls:
            return f", plans: {_plans_state(plans, calls)}"
        return ", plans: none" if self._has_optimized() and not self._waiting() else ", plans: none yet"

    def _has_optimized(self) -> bool:
        """True if ``optimize`` has been called for the reported pipeline, and found anything to do."""
        return bool(self.fused or self.merged) or any(p.is_on for p in self.plans)

    def _waiting(self) -> list[str]:
        """Names of the models that will run as plans (traced lists of kernels) when they are called.

        Models inside of other such models are left out. The list is empty as soon as one of the models was
        called.
        """
        on = [p for p in self.plans if p.is_on]
        if any(p.was_called for p in on):
            return []
        outer = {p.path for p in on}
        inner = [p for p in on if any(p.path != o and (not o or p.path.startswith(f"{o}.")) for o in outer)]
        return [p.path or p.kind for p in on if p not in inner]

    def _fused_where(self) -> str:
        return "fused" if self.runs_kernels else "fused where kernels run"

    def _graphable(self) -> list[str]:
        """Paths of modules whose calls would run as CUDA graphs after a call of ``optimize``.

        The list is empty if ``optimize`` has been called already.
        """
        stock = () if self._has_optimized() else self.graphs
        return [g.path or g.kind for g in stock if g.mode == "False" and not g.eager]

    def _without_graphs(self) -> list[str]:
        """Paths of UNets with fused blocks whose calls ran neither as CUDA graphs nor as traced plans.

        UNets whose later calls may run as graphs are left out.
        """
        if not self.runs_kernels:
            return []
        planned = {p.path for p in self.plans if p.calls}
        return [
            g.path or g.kind
            for g in self.graphs
            if g.kind in _UNETS
            and g.path not in planned
            and not (g.alive or g.replays)
            and (
                (g.mode == "False" and not g.eager)
                or not all(reason.endswith(_NO_LOSS) for reason in g.eager)
            )
            and any(f"{e.path}.".startswith(f"{g.path}." if g.path else "") for e in self.fused)
        ]

    def _counts(self) -> list[tuple[str, ...]]:
        """Returns the report's table of counts as a list: the titles of the columns, then the rows.

        The table has a row for each component and fusion, with the number of modules for each status.
        """
        counts = Counter(((e.component, e.fusion), e.status) for e in self.entries)
        pairs = dict.fromkeys(pair for pair, _ in counts)
        shown = [status for status in STATUSES if any(e.status == status for e in self.entries)]
        rows = [(*pair, *(str(counts[pair, status]) for status in shown)) for pair in pairs]
        return [("component", "fusion", *shown), *rows]

    def _lines(self, max_paths: int) -> list[str]:
        lines = _wrapped(self._summary())
        for title, more in self._paragraphs(max_paths):
            lines += _wrapped(title)
            for line in more:
                lines += _wrapped(line, "  ")
        return lines

    def _paragraphs(self, max_paths: int) -> list[tuple[str, list[str]]]:
        """Returns the report's paragraphs after the summary, as (first line, indented lines below it)."""
        found: list[tuple[str, list[str]]] = []
        if self.backend:
            found.append((f"{'runs in' if self._has_optimized() else 'would run in'}: {self.backend}", []))
        for op, reason in self.without_kernels.items():
            found.append((f"runs in plain PyTorch: {op}", [reason]))
        for status, entries in ((self._fused_where(), self.fused), ("would be fused", self.fusable)):
            counts = Counter(entry.component for entry in entries)
            if counts:
                found.append((f"{status}: {', '.join(f'{n} in {name}' for name, n in counts.items())}", []))
        if graphable := self._graphable():
            found.append((f"would be CUDA graphs on an NVIDIA GPU: {', '.join(graphable)}", []))
        for reason, paths in grouped((e.reason, e.path or e.kind) for e in self.skipped).items():
            fusions = ", ".join(dict.fromkeys(e.fusion for e in self.skipped if e.reason == reason))
            found.append((f"{len(paths)} skipped: {reason} ({fusions})", [some(paths, max_paths)]))
        for reason, models in grouped((e.reason, _named(e)) for e in self.left).items():
            found.append((f"at stock's speed: {', '.join(models)}", [reason]))
        if self.fused:
            weights = f"channels-last weights: {self.channels_last_weights}"
            found.append((f"{weights}, layout copies removed per call: {self.layout_copies_removed}", []))
        for m in self.merged:
            names = ", ".join(m.adapters) or "none active"
            memory = f"{m.layers} layers, {m.bytes / 2**20:.0f} MiB"
            found.append((f"merged LoRA in {m.path}: {memory}, adapters: {names}", []))
        found += [_fp8_paragraph(each, max_paths) for each in self.fp8]
        if self.offloaded:
            found.append((f"offloaded, with faster copies: {', '.join(self.offloaded)}", []))
        for g in self.graphs:
            if g.replays or g.eager:
                notes = [_calls_text(count, reason) for reason, count in g.eager.items()]
                if g.last_change:
                    notes.append(f"last recapture: {g.last_change}")
                state = f"{g.alive} alive, {g.replays} calls replayed"
                found.append((f"CUDA graphs of {g.path or g.kind}: {state}", notes))
        found += _plans_paragraphs(p for p in self.plans if p.was_called)
        if waiting := self._waiting():
            found.append((f"runs as plans where kernels run: {', '.join(waiting)}", []))
        for p in self.plans:
            if not p.is_on and not p.own:
                how = "with optimize(..., plans=True)" if self.fused else "where kernels run"
                found.append((f"would run as plans {how}: {p.path or p.kind}", []))
        if without := self._without_graphs():
            found.append(
                (f"without CUDA graphs a UNet is hardly faster than stock's: {', '.join(without)}", [])
            )
        if self.graph_memory_bytes:
            found.append((f"memory of CUDA graphs: {self.graph_memory_bytes / 2**20:.0f} MiB", []))
        return found


def _fp8_paragraph(f: Fp8, max_paths: int) -> tuple[str, list[str]]:
    moved = f"{f.offloading} moves their weights in each call, so they run in the model's dtype"
    notes = [moved] if f.offloading else []
    notes += [f"{f.learning} learn their scales"] if f.learning else []
    notes += [f"{f.short} of these found no memory, and try again"] if f.short else []
    notes += [f"{f.unused} were not called while the others learned"] if f.unused else []
    notes += [f"{f.adapted} have LoRA adapters, and run in the model's dtype"] if f.adapted else []
    if f.inexact:
        names = some(list(f.inexact), max_paths)
        notes.append(f"{len(f.inexact)} stay in the model's dtype, because of their error: {names}")
    if f.growing:
        names = some(list(f.growing), max_paths)
        notes.append(
            f"{len(f.growing)} stay in the model's dtype, because their inputs keep growing: {names}"
        )
    notes += [f"{f.again} learned again, because values were beyond the range of FP8"] if f.again else []
    if f.has_row_scales:
        notes.append("each row of inputs and weights has a scale")
        if not f.products and not f.offloading:
            notes.append("no plan was made yet")
    elif f.in_e4m3:
        notes.append(f"largest relative error of a product: {f.error:.3f}")
        notes.append(f"values beyond the range of FP8: {f.beyond}")
    memory = f"{f.bytes / 2**20:.0f} MiB"
    return f"FP8 in {f.path}: {f.in_e4m3} of {f.products} products, {memory}", notes


def _plans_paragraphs(plans: Iterable[Planned]) -> list[tuple[str, list[str]]]:
    """Returns the report's paragraphs about plans, which are traced lists of kernels.

    Modules with the same text, such as the blocks of a model, share a paragraph.
    """
    same: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for each in plans:
        same.setdefault(_about_plans(each), []).append(each.path or each.kind)
    return [(f"{what} {some(names)}{state}", [*notes]) for (what, state, notes), names in same.items()]


def _about_plans(p: Planned) -> tuple[str, str, tuple[str, ...]]:
    """Returns what the report says about the plans (traced lists of kernels) of a module.

    The result is (text before the module's name, text after the name, lines below).
    """
    notes = [_calls_text(count, reason) for reason, count in p.own.items()]
    if not p.is_on:
        return "no plans of", "", tuple(notes)
    if p.plans:
        kinds = some([f"{count} {step}" for step, count in p.steps.items()], _SHOWN_STEPS)
        notes.append(f"{sum(p.steps.values())} steps: {kinds}")
        notes.append(f"kernels of sdfastgn move {p.kernel_bytes / max(p.bytes, 1):.0%} of the bytes")
    if p.last_change:
        notes.append(f"last new trace: {p.last_change}")
    return "plans of", f": {_plans_state(p.plans, p.calls)}", tuple(notes)


def _plans_state(plans: int, calls: int) -> str:
    return f"{plans} alive, {calls} call{'s' * (calls != 1)} run by them"


def _calls_text(count: int, reason: str) -> str:
    """Says how many calls ran the model's own Python, without a CUDA graph or a traced plan, and why.

    ``count``: 0 if the reason holds for all calls.
    """
    return f"{count} call{'s' * (count != 1)} without: {reason}" if count else reason


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns a dict from each reason to the paths of all modules with this reason.

    ``pairs``: (reason, path) for each path.
    """
    groups: dict[str, list[str]] = {}
    for reason, path in pairs:
        groups.setdefault(reason, []).append(path)
    return groups


def some(paths: list[str], most: int = _SHOWN_PATHS) -> str:
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def parts_text(parts: Sequence[object]) -> str:
    """Returns the number of ``parts`` with the noun "part": ``1 part``, ``2 parts``."""
    return f"{len(parts)} part{'' if len(parts) == 1 else 's'}"


def _models_text(count: int) -> str:
    return f"{count} model{'s' * (count != 1)}"


def _named(model: Left) -> str:
    return f"{model.path} ({model.kind})" if model.path else model.kind


def _wrapped(text: str, indent: str = "") -> list[str]:
    # A line is never broken at a hyphen, so that users can copy names and paths from the report.
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _html_row(cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
