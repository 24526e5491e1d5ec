"""Two nodes: one that makes a MODEL and a VAE faster, one that says what has become of them."""

from __future__ import annotations

from typing import Any

_GRAPHS = {"auto": "auto", "at once": True, "never": False}


class Optimize:
    """MODEL, and VAE if it is connected, with sdfastgn's kernels; the images stay the same."""

    CATEGORY = "sdfastgn"
    FUNCTION = "optimize"
    RETURN_TYPES = ("MODEL", "VAE", "STRING")
    RETURN_NAMES = ("model", "vae", "text")
    DESCRIPTION = "Runs a UNet and an image VAE on fused channels-last kernels and CUDA graphs."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        graphs = {
            "default": "auto",
            "tooltip": "auto: from the second step of a kind on; at once: from the first; never: no graphs.",
        }
        return {
            "required": {"model": ("MODEL",), "cuda_graphs": (list(_GRAPHS), graphs)},
            "optional": {"vae": ("VAE",)},
        }

    def optimize(self, model: Any, cuda_graphs: str = "auto", vae: Any = None) -> tuple[Any, Any, str]:
        # Not at the top: sdfastgn needs Triton and compiles nothing until a model runs.
        from sdfastgn.patches.comfyui.model_patcher import optimize_model, optimize_vae, text_of_model

        model = optimize_model(model, _GRAPHS[cuda_graphs])
        text = text_of_model(model)
        if vae is not None:
            vae = optimize_vae(vae)
            text += "\n" + text_of_model(vae.patcher)
        return model, vae, text


class Report:
    """What of a MODEL runs fused and what as stock, with the reasons, after ``latent`` was made with it."""

    CATEGORY = "sdfastgn"
    FUNCTION = "report"
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latent", "text")
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        latent = {"tooltip": "Of the sampler that ran the model: the report is made after it."}
        return {"required": {"model": ("MODEL",), "latent": ("LATENT", latent)}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")  # never equal: each run has a report of its own

    def report(self, model: Any, latent: Any) -> dict[str, Any]:
        from sdfastgn.patches.comfyui.model_patcher import text_of_model

        text = text_of_model(model)
        return {"ui": {"text": [text]}, "result": (latent, text)}


NODE_CLASS_MAPPINGS = {"SdfastgnOptimize": Optimize, "SdfastgnReport": Report}
NODE_DISPLAY_NAME_MAPPINGS = {"SdfastgnOptimize": "sdfastgn Optimize", "SdfastgnReport": "sdfastgn Report"}
