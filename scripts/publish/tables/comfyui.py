"""Markdown tables of ComfyUI, stock and with sdfastgn.

They show its images, its sampler with weights that it casts or moves at each call, and its decodes of videos.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.publish.tables.markdown import documents, markdown, speed_up
from sdfastgn.bench.documents import OK
from sdfastgn.bench.tables.cells import NOTHING, error_text, number, source_line, without_empty_columns
from sdfastgn.bench.tables.profile import MODEL_LABELS
from sdfastgn.program import counted

_LABELS = {"stock": "stock", "channels_last": "--force-channels-last", "sdfastgn": "**sdfastgn**"}


def comfyui_markdown(results: Path) -> str:
    """Returns a table of ComfyUI's times, with a line for each model, release, setting and variant.

    Latents and pixels are compared with stock's. The difference of latents is relative to the norm of stock's
    latents. The difference of pixels is the maximum over all pixels, whose values are in [0, 1].
    """
    lines, sources = [], []
    for content in documents(results, "comfyui"):
        # Rows of older files have no model, size and steps: these are in the config, because all rows share
        # them.
        rows = [{"status": OK, "dynamic_vram": False, **content["config"], **row} for row in content["rows"]]
        stock = {_setting(row): row for row in rows if (row["variant"], row["status"]) == ("stock", OK)}
        lines += [_cells(row, stock.get(_setting(row))) for row in rows]
        releases = ", ".join(dict.fromkeys(row["comfyui"] for row in rows))
        sources.append(f"ComfyUI {releases}, {source_line(content)}")
    return markdown(*without_empty_columns(lines), sources)


def comfyui_vaes_markdown(results: Path) -> str:
    """Returns a table of ComfyUI's decodes of videos, with a line for each autoencoder and release.

    The difference of pixels from stock's is relative to the norm of stock's pixels.
    """
    return _table(results, "comfyui_vaes", _vae_cells, lambda config: "bfloat16")


def comfyui_weights_markdown(results: Path) -> str:
    """Returns a table of ComfyUI's sampler with SDXL, with a line for each release and kind of weights.

    The difference of latents from stock's is relative to the norm of stock's latents.
    """
    return _table(
        results,
        "comfyui_weights",
        _weights_cells,
        lambda config: f"SDXL {config['size']}², {counted(config['steps'], 'step')}",
    )


def _table(
    results: Path,
    kind: str,
    cells: Callable[[dict[str, Any]], dict[str, str]],
    setting: Callable[[dict[str, Any]], str],
) -> str:
    """Returns a table with a line of ``cells(row)`` for each row of all results of the kind ``kind``.

    ``setting(config)``: what all rows of a result share, for the line below the table that names its source.
    """
    found = documents(results, kind)
    lines = [cells(row) for content in found for row in content["rows"]]
    sources = [f"{setting(content['config'])}, {source_line(content)}" for content in found]
    return markdown(*without_empty_columns(lines), sources)


def _weights_cells(row: dict[str, Any]) -> dict[str, str]:
    what = f"{row['weights']}, {row['comfyui']}"
    if row["status"] != OK:
        row, what = {}, f"{what}: {row['reason']}"
    return {
        "weights, ComfyUI": what,
        "MiB of weights on the GPU": number(row.get("gpu_mib")),
        "stock it/s": number(row.get("stock_it_per_s")),
        "sdfastgn it/s": number(row.get("it_per_s")),
        "speed-up": speed_up(1 / row["stock_it_per_s"], 1 / row["it_per_s"]) if row else NOTHING,
        "peak MiB, stock": number(row.get("stock_peak_mib")),
        "peak MiB": number(row.get("peak_mib")),
        "latents' difference": error_text(row.get("difference")),
        "same bits after ejection": _same_bits(
            row.get("is_exact_after_ejection"), row.get("stock_repeats_itself", True)
        ),
    }


def _same_bits(is_exact: bool | None, stock_repeats: bool) -> str:
    """The text of a cell: whether stock has the same bits again after sdfastgn was removed.

    A difference is no error if two runs of stock also differ from each other (``stock_repeats`` is False).
    """
    if is_exact is None:
        return NOTHING
    return "yes" if is_exact else "**no**" if stock_repeats else "stock's own differ"


def _vae_cells(row: dict[str, Any]) -> dict[str, str]:
    what = f"{row.get('model', 'all')}, {row['comfyui']}{_dynamic(row)}"
    if row["status"] != OK:
        row, what = {}, f"{what}: {row['reason']}"
    return {
        "autoencoder, ComfyUI": what,
        "stock ms": number(row.get("stock_ms")),
        "sdfastgn ms": number(row.get("optimized_ms")),
        "speed-up": speed_up(row["stock_ms"], row["optimized_ms"]) if row else NOTHING,
        "peak MiB, stock": number(row.get("stock_mib")),
        "peak MiB": number(row.get("optimized_mib")),
        "pixels' difference": error_text(row.get("difference")),
        "same bits after ejection": _same_bits(row.get("is_exact_after_ejection"), True),
    }


def _dynamic(row: dict[str, Any]) -> str:
    return " with DynamicVRAM" if row.get("dynamic_vram") else ""


def _setting(row: dict[str, Any]) -> tuple[Any, ...]:
    """The settings of a row. A row is compared with the row of stock that has the same settings."""
    return tuple(row[name] for name in ("comfyui", "dynamic_vram", "model", "size", "steps"))


def _cells(row: dict[str, Any], stock: dict[str, Any] | None) -> dict[str, str]:
    model = f"{MODEL_LABELS[row['model']]} {row['size']}², {counted(row['steps'], 'step')}"
    what = f"{model}, {row['comfyui']}{_dynamic(row)}, {_LABELS[row['variant']]}"
    if row["status"] != OK:
        row = {**row, "it_per_s": None}
        what += f": {row['reason']}"
    compile_text = " (compiles)" if row.get("first_compiled") else ""
    return {
        "ComfyUI": what,
        "it/s": _rate(row, stock, "it_per_s"),
        "it/s with a LoRA": _rate(row, stock, "lora_it_per_s"),
        "it/s with a ControlNet": _rate(row, stock, "control_it_per_s"),
        "VAE decode, ms": number(row.get("decode_ms")),
        "first image, s": number(row.get("first_s"), 2) + compile_text,
        "new LoRA strength, s": number(row.get("changed_strength_s"), 2),
        "latents' difference": error_text(row.get("latent_difference")),
        "pixels' difference": error_text(row.get("image_difference")),
        "same bits after ejection": _after_ejection(row),
    }


def _rate(row: dict[str, Any], stock: dict[str, Any] | None, name: str) -> str:
    """The text of a cell: iterations per second, and the speed-up over stock."""
    rate = row.get(name)
    if rate is None:
        return NOTHING
    return f"{rate:.1f}" if stock is None or stock is row else f"{rate:.1f} ({rate / stock[name]:.2f}x)"


def _after_ejection(row: dict[str, Any]) -> str:
    if "exact_after_ejection" not in row:
        return NOTHING
    # After ComfyUI has ejected (removed) sdfastgn, the outputs should have stock's bits again.
    wrong = [part for part, is_exact in row["exact_after_ejection"].items() if not is_exact]
    return _same_bits(not wrong, any(row["stock_repeats_itself"][part] for part in wrong))
