"""The tables of ComfyUI's times."""

from __future__ import annotations

from scripts.publish.tables.comfyui import (
    comfyui_markdown,
    comfyui_vaes_markdown,
    comfyui_weights_markdown,
)
from sdfastgn.bench.documents import document, write_json

SAME = {"sampler": True, "vae": True}
CONFIG = {"model": "sdxl", "size": 1024, "steps": 30}


def lines_of(tmp_path, config, rows):
    content = document("comfyui", {"gpu": "GPU"}, config, [])
    content["rows"] += rows
    write_json(tmp_path / "a.json", content)
    return comfyui_markdown(tmp_path).splitlines()


def test_a_line_for_each_variant(tmp_path):
    ours = {"latent_difference": 1e-3, "image_difference": 0.02, "exact_after_ejection": SAME}
    ours["stock_repeats_itself"] = SAME
    rows = [
        {"variant": "stock", "comfyui": "0.8.0", "it_per_s": 16.0, "decode_ms": 130.0},
        {"variant": "sdfastgn", "comfyui": "0.8.0", "it_per_s": 24.0, "decode_ms": 65.25, **ours},
    ]
    lines = lines_of(tmp_path, CONFIG, rows)
    assert lines[2] == "| SDXL 1024², 30 steps, 0.8.0, stock | 16.0 | 130 | - | - | - |"
    assert lines[3].endswith("**sdfastgn** | 24.0 (1.50x) | 65.2 | 1.0e-03 | 2.0e-02 | yes |")
    assert lines[-1].startswith("ComfyUI 0.8.0, GPU")
    rows[1]["exact_after_ejection"] = {**SAME, "vae": False}
    assert lines_of(tmp_path, CONFIG, rows)[3].endswith("| **no** |")
    rows[1]["stock_repeats_itself"] = {**SAME, "vae": False}
    assert lines_of(tmp_path, CONFIG, rows)[3].endswith("| stock's own differ |")


def test_a_row_is_compared_to_stock_with_the_same_release_and_setting(tmp_path):
    def row(release, is_dynamic, variant, rate):
        rates = {"it_per_s": rate, "lora_it_per_s": rate / 2, "control_it_per_s": rate / 4, "first_s": 3.21}
        named = {"comfyui": release, "dynamic_vram": is_dynamic, "variant": variant, "status": "ok"}
        return {**CONFIG, **named, **rates, "first_compiled": 7 * (variant == "sdfastgn")}

    rows = [row("2.0", False, "stock", 10), row("2.0", True, "stock", 8), row("2.0", True, "sdfastgn", 16)]
    rows.append({**row("1.0", False, "stock", 1), "status": "failed", "reason": "no memory", "it_per_s": 1})
    header, _, _, _, ours, failed, _, source = lines_of(tmp_path, {}, rows)
    assert header.count("|") == 6
    assert ours.endswith(
        "2.0 with DynamicVRAM, **sdfastgn** | 16.0 (2.00x) | 8.0 (2.00x) | 4.0 (2.00x) | 3.2 (compiles) |"
    )
    assert failed.startswith("| SDXL 1024², 30 steps, 1.0, stock: no memory | - |")
    assert source.startswith("ComfyUI 2.0, 1.0, GPU")


def test_a_line_for_each_autoencoder_of_videos(tmp_path):
    times = {"stock_ms": 300.0, "stock_mib": 4000.0, "optimized_ms": 150.0, "optimized_mib": 3000.0}
    row = {
        "comfyui": "2.0",
        "dynamic_vram": True,
        "model": "Wan",
        "status": "ok",
        **times,
        "difference": 1e-3,
    }
    rows = [{**row, "is_exact_after_ejection": exact} for exact in (True, False)]
    rows.append({"comfyui": "1.0", "status": "failed", "reason": "no memory"})
    content = document("comfyui_vaes", {"gpu": "GPU"}, {}, [])
    content["rows"] += rows
    write_json(tmp_path / "a.json", content)
    _, _, exact, inexact, failed, _, source = comfyui_vaes_markdown(tmp_path).splitlines()
    assert exact == "| Wan, 2.0 with DynamicVRAM | 300 | 150 | 2.00x | 4000 | 3000 | 1.0e-03 | yes |"
    assert inexact.endswith("| **no** |")
    assert failed == "| all, 1.0: no memory | - | - | - | - | - | - | - |"
    assert source.startswith("bfloat16, GPU")


def test_a_line_for_each_kind_of_weights(tmp_path):
    stock = {"stock_it_per_s": 8.0, "stock_peak_mib": 6000.0, "stock_repeats_itself": True}
    ours = {"it_per_s": 12.0, "peak_mib": 5000.0, "gpu_mib": 2400.0, "difference": 1e-3}
    row = {"comfyui": "2.0", "weights": "fp8", "status": "ok", **stock, **ours}
    rows = [{**row, "is_exact_after_ejection": exact} for exact in (True, False)]
    rows.append({**rows[1], "stock_repeats_itself": False})
    rows.append({"comfyui": "1.0", "weights": "fp16", "status": "failed", "reason": "no memory"})
    content = document("comfyui_weights", {"gpu": "GPU"}, {"size": 1024, "steps": 8}, [])
    content["rows"] += rows
    write_json(tmp_path / "a.json", content)
    _, _, exact, inexact, unknown, failed, _, source = comfyui_weights_markdown(tmp_path).splitlines()
    assert exact == "| fp8, 2.0 | 2400 | 8 | 12 | 1.50x | 6000 | 5000 | 1.0e-03 | yes |"
    assert inexact.endswith("| **no** |")
    assert unknown.endswith("| stock's own differ |")
    assert failed.startswith("| fp16, 1.0: no memory | - | - |")
    assert source.startswith("SDXL 1024², 8 steps, GPU")
