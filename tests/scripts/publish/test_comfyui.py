"""The table of ComfyUI's times."""

from __future__ import annotations

from scripts.publish.tables.pipelines import comfyui_markdown
from sdfastgn.bench.documents import document, write_json


def test_a_line_for_each_variant(tmp_path):
    content = document("comfyui", {"gpu": "GPU"}, {"model": "sdxl", "size": 1024, "steps": 30}, [])
    same = {"sampler": True, "vae": True}
    ours = {"latent_difference": 1e-3, "image_difference": 0.02, "exact_after_ejection": same}
    ours["stock_repeats_itself"] = same
    content["rows"] += [
        {"variant": "stock", "comfyui": "0.8.0", "it_per_s": 16.0, "decode_ms": 130.0},
        {"variant": "sdfastgn", "comfyui": "0.8.0", "it_per_s": 24.0, "decode_ms": 65.25, **ours},
    ]
    write_json(tmp_path / "a.json", content)
    lines = comfyui_markdown(tmp_path).splitlines()
    assert lines[2] == "| SDXL 1024², 30 steps, stock | 16.0 | 1.00x | 130 | - | - | - |"
    assert lines[3].endswith("**sdfastgn** | 24.0 | 1.50x | 65.2 | 1.0e-03 | 2.0e-02 | yes |")
    assert lines[-1].startswith("ComfyUI 0.8.0, GPU")
    content["rows"][1]["exact_after_ejection"] = {**same, "vae": False}
    write_json(tmp_path / "a.json", content)
    assert comfyui_markdown(tmp_path).splitlines()[3].endswith("| **no** |")
    content["rows"][1]["stock_repeats_itself"] = {**same, "vae": False}
    write_json(tmp_path / "a.json", content)
    assert comfyui_markdown(tmp_path).splitlines()[3].endswith("| stock's own differ |")
