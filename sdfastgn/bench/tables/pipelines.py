"""Runs of the scripts as tables: first images, what the CPU does around the models, ComfyUI's times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdfastgn.bench.documents import OK
from sdfastgn.bench.models.host import HostRow
from sdfastgn.bench.models.variants import label
from sdfastgn.bench.models.warm_up import WaitRow
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.tables.markdown import (
    NO_RESULTS,
    NOTHING,
    documents,
    markdown,
    number,
    source_line,
)
from sdfastgn.bench.tables.profile import MODEL_LABELS
from sdfastgn.program import counted

# Milliseconds below which a function is in no line of its own, whoever calls it.
_LEAST_MS = 0.1
_COMFYUI_LABELS = {"stock": "stock", "channels_last": "--force-channels-last", "sdfastgn": "**sdfastgn**"}
_COMFYUI_HEADER = (
    "ComfyUI", "it/s", "over stock", "VAE decode, ms", "latents' difference", "pixels' difference",
    "same bits after ejection",
)  # fmt: skip


def pipeline_table(content: dict[str, Any]) -> Blocks:
    """The one table of a result whose kind is among ``PIPELINE_TABLES``."""
    title, row, table = PIPELINE_TABLES[content["kind"]]
    (part,) = content["config"]["parts"]
    shown = table([row(**values) for values in content["rows"]])
    return replace(shown, title=f"{title}, {part['model']} {part['size']}²")


def pipelines_markdown(results: Path, kind: str) -> str:
    """The table of each committed run of a pipeline, and below it what ran."""
    blocks = []
    for content in documents(results, kind):
        shown, config = pipeline_table(content), content["config"]
        (part,) = config["parts"]
        model = MODEL_LABELS.get(part["model"], part["model"])
        what = f"{model} pipeline {part['size']}², {counted(part['steps'], 'step')}, {part['dtype']}"
        what += f"; new size {config['new_size']}²" if "new_size" in config else ""
        blocks.append(markdown(shown.header, shown.body, [f"{what}. {source_line(content)}"]))
    return "\n\n".join(blocks) or NO_RESULTS


def warm_up_table(rows: Sequence[WaitRow]) -> Blocks:
    """A line for each way; without times where the image was wrong."""
    seconds = ("second image after s", "over eager s", "third image s", "new size, over replays s")
    header = ("variant", *seconds, "peak MiB", "reserved MiB", "PSNR dB")
    notes = [f"{row.variant}: {row.status}: {row.reason}" for row in rows if row.status != OK]
    return Blocks(header, [_wait_cells(row, rows[0]) for row in rows], notes=notes)


def _wait_cells(row: WaitRow, eager: WaitRow) -> list[str]:
    if row.status != OK:
        return [row.variant, row.status]
    over = row.second_image_s - eager.second_image_s if eager.image_s and row is not eager else None
    cells = (
        (row.second_image_s, ".2f"), (over, "+.2f"), (row.image_s[-1], ".3f"), (row.new_size_over_s, ".3f"),
        (row.peak_mib, ".0f"), (row.reserved_mib, ".0f"), (row.psnr_db, ".1f"),
    )  # fmt: skip
    return [row.variant, *(NOTHING if value is None else format(value, spec) for value, spec in cells)]


def host_table(rows: Sequence[HostRow]) -> Blocks:
    """A line for each function that takes long enough in one way; first the image, then all functions."""
    names = dict.fromkeys(name for row in rows for name, ms in row.functions.items() if ms >= _LEAST_MS)
    body = [
        ["the image", *(number(row.total_ms) for row in rows)],
        *([f"`{name}`", *(number(row.functions.get(name)) for row in rows)] for name in names),
    ]
    return Blocks(["ms an image", *(label(row.variant) for row in rows)], body)


# Kinds of results that have one such table: its title, what makes a row, and what makes the table.
PIPELINE_TABLES: dict[str, tuple[str, type, Callable[[Sequence[Any]], Blocks]]] = {
    "warm_up": ("first images", WaitRow, warm_up_table),
    "host": ("what the pipeline calls", HostRow, host_table),
}


def comfyui_markdown(results: Path) -> str:
    """A line for each model and variant. Latents relative to their norm, pixels of 1 at most."""
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
    # A part that stock itself does not repeat cannot tell.
    wrong = [part for part, exact in row["exact_after_ejection"].items() if not exact]
    told = any(row["stock_repeats_itself"][part] for part in wrong)
    return [*times, *differences, "**no**" if told else "stock's own differ" if wrong else "yes"]
