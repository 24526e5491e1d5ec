"""The Markdown table of ``scripts.publish.plans``: networks with fused blocks, and as plans.

A plan is a model's own code, traced and rewritten to a list of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import failed_cells, latest_rows, markdown
from sdfastgn.bench.documents import FAILED, OK
from sdfastgn.bench.tables.cells import error_text, number, source_line

_HEADER = (
    "model", "dtype", "graph, ms", "call, ms", "CPU, ms", "peak, GB", "error", "first call, s",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """The time and the memory of a call.

    Attributes:
        ms: median milliseconds until the GPU has finished.
        cpu_ms: median milliseconds until the call has launched all of its work.
        graph_ms: median milliseconds of a CUDA graph of the call; None if it has none.
        peak_gb: peak memory of tensors in GB, weights included; None on the CPU.
    """

    ms: float
    cpu_ms: float
    graph_ms: float | None
    peak_gb: float | None


@dataclass(frozen=True)
class PlanRow:
    """The measurement of one call of one model, with fused blocks and as a plan.

    A plan is the model's own code, traced and rewritten to a list of kernels.

    Attributes:
        fused, plan: the cost of the call with fused blocks, and as a plan; None if it failed.
        fused_error, plan_error: relative error against stock's output in fp32, of the output with fused
            blocks and of the plan's output. None if it was not measured.
        difference: relative error of the plan's output against the output with fused blocks.
        first_s: seconds of the first call as a plan, in which the model's code is traced.
        own: reasons why some modules of the model ran their own code instead of a plan.
    """

    model: str
    dtype: str
    fused: Cost | None
    plan: Cost | None
    fused_error: float | None = None
    plan_error: float | None = None
    difference: float | None = None
    first_s: float | None = None
    own: Sequence[str] = field(default_factory=tuple)
    status: str = OK
    reason: str = ""

    @classmethod
    def failed(cls, model: str, dtype: str, reason: str) -> PlanRow:
        return cls(model, dtype, None, None, status=FAILED, reason=reason)


def plans_markdown(results: Path) -> str:
    """Returns a table with a line for each network. If several runs have timed it, the latest is shown."""
    latest = latest_rows(results, "plans")
    body = sorted(_cells(values) for values, _ in latest)
    return markdown(_HEADER, body, [source_line(run) for _, run in latest])


def _cells(values: dict[str, Any]) -> list[str]:
    first = [values["model"], values["dtype"]]
    if values["status"] != OK:
        return failed_cells(first, values["status"], values["reason"], len(_HEADER))
    costs = [Cost(**values[name]) for name in ("fused", "plan")]
    pairs = [(f"{number(a)} / {number(b)}") for a, b in zip(*map(_numbers, costs), strict=True)]
    errors = [error_text(values[name]) for name in ("fused_error", "plan_error")]
    return [*first, *pairs, " / ".join(errors), number(values["first_s"])]


def _numbers(cost: Cost) -> list[float | None]:
    return [cost.graph_ms, cost.ms, cost.cpu_ms, cost.peak_gb]
