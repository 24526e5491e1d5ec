"""The terminal's tables of ``sdfastgn bench --profile``: where the time of a call goes."""

from __future__ import annotations

from collections.abc import Sequence

from sdfastgn.bench.documents import OK
from sdfastgn.bench.kernel_categories import CATEGORIES, FLOOR, GAPS, OTHER
from sdfastgn.bench.profiling import CPU, Breakdown
from sdfastgn.bench.run import Row
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.tables.cells import extent, number, without_empty_columns
from sdfastgn.bench.variants import label
from sdfastgn.program import counted

FLOOR_NAMES = " + ".join(FLOOR)

MODEL_LABELS = {
    "sd15": "SD1.5",
    "sdxl": "SDXL",
    "lcm": "LCM",
    "sd_turbo": "SD-Turbo",
    "wan": "Wan 2.1",
    "qwen_image": "Qwen-Image",
    "hunyuan_video": "HunyuanVideo",
    "cogvideox": "CogVideoX",
    "svd": "SVD",
    "animatediff": "AnimateDiff",
    "flux": "Flux.1",
    "flux2_klein": "Flux.2 klein",
    "sd35": "SD3.5-medium",
    "zimage": "Z-Image",
    "ltx": "LTX",
}
PART_LABELS = {
    "unet": "UNet step",
    "vae": "VAE decode",
    "transformer": "transformer step",
    "pipeline": "pipeline",
    "train": "training step",
}

# Maximum number of characters of a kernel's name in a table. Names of C++ templates may have a thousand.
_NAME_LENGTH = 110
_OTHERS_SHOWN = 5


def row_title(row: Row) -> str:
    """Describes in words what a row measures: model, part, size, batch and dtype."""
    model = MODEL_LABELS.get(row.model, row.model)
    what = f"VAE decode, {model}" if row.part == "vae" else f"{model} {PART_LABELS[row.part]}"
    lora = "" if row.lora_rank is None else f" of a LoRA of rank {row.lora_rank},"
    return f"{what}{lora} {extent(row.size, row.width, row.frames)}, batch {row.batch}, {row.dtype}"


def breakdown_of(row: Row) -> Breakdown | None:
    """A row's breakdown of the call's time; None if the row has none, or if its output was wrong."""
    return Breakdown(**row.profile) if row.profile is not None and row.status == OK else None


def _found(rows: Sequence[Row]) -> list[tuple[str, Breakdown]]:
    """Returns (label of the way to run the model, breakdown of the time) for each row with a breakdown."""
    pairs = [(label(row.variant), breakdown_of(row)) for row in rows]
    return [(name, found) for name, found in pairs if found is not None]


def lowest_floor(rows: Sequence[Row]) -> tuple[str, float] | None:
    """Returns (label of the variant with the lowest floor, its floor in ms); None if no row has a profile.

    A floor is the time of a call's convolutions, GEMMs and attention, which no fusion can remove.
    """
    floors = [(label, found.floor_ms) for label, found in _found(rows)]
    return min(floors, key=lambda pair: pair[1], default=None)


def profile_table(rows: Sequence[Row], title: str) -> Blocks | None:
    """A table of milliseconds per category of kernels. It has a row for each of ``rows`` with a breakdown.

    Returns None if no row has a breakdown.
    """
    found = _found(rows)
    shown = [name for name in (*CATEGORIES, GAPS) if name != OTHER or any(one.other for _, one in found)]
    cells = [
        {
            "ms": name,
            "recorded": one.source,
            **{category: number(one.categories[category]) for category in shown},
            "total": number(one.total_ms, 4),
            "timed": number(one.timed_ms, 4),
            "floor": number(one.floor_ms, 4),
            "floor share": f"{100 * one.floor_share:.0f} %",
            "call's gaps": number(one.call_gaps_ms),
        }
        for name, one in found
    ]
    if not cells:
        return None
    return Blocks(*without_empty_columns(cells), title, _legend(rows), left=2, notes=_notes(rows))


def _legend(rows: Sequence[Row]) -> str:
    if any(found.source == CPU for _, found in _found(rows)):
        return f"CPU operator time, not kernels; launch gaps: outside operators; floor: {FLOOR_NAMES}"
    return (
        "total: first to last kernel, with the profiler; timed: the same call or replay without the "
        f"profiler; floor: {FLOOR_NAMES}; call's gaps: a call's time without profiler and graph, minus the "
        "time of its kernels"
    )


def floor_line(rows: Sequence[Row]) -> list[str]:
    lowest = lowest_floor(rows)
    return [] if lowest is None else [f"lowest floor: {number(lowest[1], 4)} ms, of {lowest[0]}"]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Lines under the table: the lowest floor, and kernels that fit no category.

    A floor is the time of a call's convolutions, GEMMs and attention.
    """
    lines = floor_line(rows)
    for name, found in _found(rows):
        for entry in found.other[:_OTHERS_SHOWN]:
            share = 100 * entry["ms"] / found.total_ms
            kernel = entry["name"][:_NAME_LENGTH] + "..." * (len(entry["name"]) > _NAME_LENGTH)
            what = f"{number(entry['ms'])} ms ({share:.1f} %) in {entry['calls']:g} of {kernel}"
            lines.append(f"other, {name}: {what}")
        if len(found.other) > _OTHERS_SHOWN:
            rest = sum(entry["ms"] for entry in found.other[_OTHERS_SHOWN:])
            others = counted(len(found.other) - _OTHERS_SHOWN, "more name")
            lines.append(f"other, {name}: {number(rest)} ms in {others}")
    return lines
