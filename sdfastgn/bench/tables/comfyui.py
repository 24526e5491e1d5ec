"""Runs of ``scripts/time_comfyui.py`` as a table in Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdfastgn.bench.tables.markdown import NO_RESULTS, NOTHING, documents, markdown_table, number, source_line
from sdfastgn.bench.tables.profile import MODEL_LABELS

_LABELS = {"stock": "stock", "channels_last": "--force-channels-last", "sdfastgn": "**sdfastgn**"}
_HEADER = (
    "ComfyUI", "it/s", "over stock", "VAE decode, ms", "latents' difference", "pixels' difference",
    "same bits after ejection",
)  # fmt: skip


def comfyui_markdown(results: Path) -> str:
    """A line for each model and variant. Latents relative to their norm, pixels of 1 at most."""
    found = documents(results, "comfyui")
    body, sources = [], []
    for content in found:
        config, rows = content["config"], content["rows"]
        model = f"{MODEL_LABELS[config['model']]} {config['size']}², {config['steps']} steps"
        body += [[f"{model}, {_LABELS[row['variant']]}", *_cells(row, rows[0])] for row in rows]
        sources.append(f"ComfyUI {rows[0]['comfyui']}, {source_line(content)}.")
    return "\n\n".join([markdown_table(_HEADER, body), *dict.fromkeys(sources)]) if found else NO_RESULTS


def _cells(row: dict[str, Any], stock: dict[str, Any]) -> list[str]:
    rate = row["it_per_s"]
    times = [f"{rate:.1f}", f"{rate / stock['it_per_s']:.2f}x", number(row["decode_ms"])]
    if "exact_after_ejection" not in row:
        return [*times, NOTHING, NOTHING, NOTHING]
    differences = [f"{row[name]:.1e}" for name in ("latent_difference", "image_difference")]
    return [*times, *differences, _exactness(row)]


def _exactness(row: dict[str, Any]) -> str:
    """Of sampler and VAE; a part that stock itself does not repeat cannot tell."""
    repeats = row["stock_repeats_itself"]
    wrong = [part for part, exact in row["exact_after_ejection"].items() if not exact]
    if not wrong:
        return "yes"
    return "**no**" if any(repeats[part] for part in wrong) else "stock's own differ"
