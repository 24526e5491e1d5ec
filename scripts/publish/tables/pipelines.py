"""Markdown tables of a pipeline's first images, of its CPU time, and of ComfyUI's times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import NO_RESULTS, documents, markdown
from sdfastgn.bench.tables.cells import NOTHING, number, source_line
from sdfastgn.bench.tables.pipelines import pipeline_table
from sdfastgn.bench.tables.profile import MODEL_LABELS
from sdfastgn.program import counted

_COMFYUI_LABELS = {"stock": "stock", "channels_last": "--force-channels-last", "sdfastgn": "**sdfastgn**"}
_COMFYUI_HEADER = (
    "ComfyUI", "it/s", "over stock", "VAE decode, ms", "latents' difference", "pixels' difference",
    "same bits after ejection",
)  # fmt: skip


def pipelines_markdown(results: Path, kind: str) -> str:
    """Returns a table for each committed result of this kind (``warm_up`` or ``host``).

    A line below each table names the pipeline and the run.
    """
    blocks = []
    for content in documents(results, kind):
        shown, config = pipeline_table(content), content["config"]
        (part,) = config["parts"]
        model = MODEL_LABELS.get(part["model"], part["model"])
        what = f"{model} pipeline {part['size']}², {counted(part['steps'], 'step')}, {part['dtype']}"
        what += f"; new size {config['new_size']}²" if "new_size" in config else ""
        blocks.append(markdown(shown.header, shown.body, [f"{what}. {source_line(content)}"]))
    return "\n\n".join(blocks) or NO_RESULTS


def comfyui_markdown(results: Path) -> str:
    """Returns a table of ComfyUI's times, with a line for each model and variant.

    Latents and pixels are compared with stock's. The difference of latents is relative to the norm of stock's
    latents. The difference of pixels is the maximum over all pixels, whose values are in [0, 1].
    """
    body, sources = [], []
    for content in documents(results, "comfyui"):
        config, rows = content["config"], content["rows"]
        model = f"{MODEL_LABELS[config['model']]} {config['size']}², {counted(config['steps'], 'step')}"
        body += [
            [f"{model}, {_COMFYUI_LABELS[row['variant']]}", *_comfyui_cells(row, rows[0])] for row in rows
        ]
        sources.append(f"ComfyUI {rows[0]['comfyui']}, {source_line(content)}")
    return markdown(_COMFYUI_HEADER, body, sources)


def _comfyui_cells(row: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    rate = row["it_per_s"]
    times = [f"{rate:.1f}", f"{rate / stock['it_per_s']:.2f}x", number(row["decode_ms"])]
    if "exact_after_ejection" not in row:
        return [*times, NOTHING, NOTHING, NOTHING]
    differences = [f"{row[name]:.1e}" for name in ("latent_difference", "image_difference")]
    # After ComfyUI has ejected (removed) sdfastgn, the outputs should be stock's again. If two runs of stock
    # differ from each other, a difference here is no error.
    wrong = [part for part, exact in row["exact_after_ejection"].items() if not exact]
    told = any(row["stock_repeats_itself"][part] for part in wrong)
    return [*times, *differences, "**no**" if told else "stock's own differ" if wrong else "yes"]
