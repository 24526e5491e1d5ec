"""The nodes: their names, inputs, outputs and functions.

ComfyUI has two formats for declaring nodes, V1 and V3. ``v1.py`` declares ``NODES`` in V1, ``v3.py`` in V3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_GRAPHS = {"auto": "auto", "at once": True, "never": False}


class Input(NamedTuple):
    """An input of a node. ``choices``: the entries of a drop-down list, the default first; else empty."""

    id: str
    type: str
    tooltip: str
    choices: tuple[str, ...] = ()
    is_optional: bool = False


class Output(NamedTuple):
    id: str
    type: str
    tooltip: str


class Node(NamedTuple):
    """A node of ComfyUI.

    ``run`` takes ``node_id`` and the inputs by name, and returns the outputs. The last output is a text,
    which is also shown on the node. ``always_runs``: True if the node runs each time the user runs the
    workflow, even if its inputs have not changed or nothing is connected to its outputs.
    """

    id: str
    name: str
    description: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    run: Callable[..., tuple[Any, ...]]
    always_runs: bool = False


_MODEL = Input("model", "MODEL", "An SD 1.5, SD 2 or SDXL model, with or without LoRAs.")
_VAE = Input(
    "vae",
    "VAE",
    "The VAE of SD 1.5, SD 2, SDXL, SD3, Flux, Wan, Qwen-Image, HunyuanVideo, HunyuanVideo 1.5, "
    "HunyuanImage's refiner or SeedVR2. Others may run as plans.",
)
_GRAPHS_INPUT = Input(
    "cuda_graphs",
    "COMBO",
    "When steps run as CUDA graphs. auto: from the second step of an image size on. at once: from the first "
    "step. never: not at all, to save memory.",
    tuple(_GRAPHS),
)
_PLANS_INPUT = Input(
    "plans",
    "COMBO",
    "Whether a VAE without fused blocks, such as those of Wan and SeedVR2, runs as plans: its first call of "
    "a size is traced, and later calls run fused kernels.",
    ("yes", "no"),
    is_optional=True,
)
_TEXT = Output(
    "text",
    "STRING",
    "The report: what is faster, which parts run ComfyUI's own code (stock) and why, memory of CUDA graphs.",
)


# The functions below import parts of sdfastgn only when a node runs. These parts import Triton, and the start
# of ComfyUI should not wait for that.


def _optimize(node_id: Any, model: Any, cuda_graphs: str = "auto", vae: Any = None) -> tuple[Any, ...]:
    from sdfastgn.patches.comfyui.model_patcher import check_vae
    from sdfastgn.plans.comfyui import optimize_model, optimize_vae, text_of

    texts: dict[str, str] = {}  # "model" or "vae" -> the latest report on it

    def renew(part: str, text: str) -> None:
        texts[part] = text
        _show(node_id, "\n".join(texts.values()))

    if vae is not None:
        check_vae(vae)
    model = optimize_model(model, _GRAPHS[cuda_graphs], lambda text: renew("model", text))
    texts["model"] = text_of(model, has_run=False)
    if vae is not None:
        vae = optimize_vae(vae, lambda text: renew("vae", text))
        texts["vae"] = text_of(vae.patcher)
    return model, vae, "\n".join(texts.values())


def _optimize_vae(node_id: Any, vae: Any, plans: str = "yes") -> tuple[Any, ...]:
    from sdfastgn.plans.comfyui import optimize_vae, text_of

    vae = optimize_vae(vae, lambda text: _show(node_id, text), plans=plans == "yes")
    return vae, text_of(vae.patcher)


def _report(node_id: Any, model: Any, latent: Any, vae: Any = None) -> tuple[Any, ...]:
    from sdfastgn.patches.comfyui.model_patcher import call_after_load
    from sdfastgn.plans.comfyui import text_of

    text = text_of(model)
    if vae is None:
        return latent, text
    # VAE Decode loads the VAE only after this node has run. Then the node shows the VAE's report anew.
    call_after_load(
        vae, f"sdfastgn report {node_id}", lambda of_vae: _show(node_id, f"{text}\n{of_vae}"), text_of
    )
    return latent, f"{text}\n{text_of(vae.patcher)}"


def _show(node_id: Any, text: str) -> None:
    """Shows a new ``text`` on a node that has already run, by a message to the page that runs it."""
    module = sys.modules.get("server")  # None if a script calls the nodes without ComfyUI's server
    server = getattr(getattr(module, "PromptServer", None), "instance", None)
    if server is not None:
        server.send_sync("sdfastgn.text", {"node": node_id, "text": text}, server.client_id)


NODES = (
    Node(
        "SdfastgnOptimize",
        "sdfastgn Optimize",
        "Makes a model and the ControlNets that it runs with faster: fused channels-last kernels and CUDA "
        "graphs. The images stay the same up to rounding. After each run the text on the node says what "
        "became faster, and what did not and why.",
        (_MODEL, _GRAPHS_INPUT, _VAE._replace(is_optional=True)),
        (
            Output("model", "MODEL", "A faster copy. The model that came in stays as it was."),
            Output("vae", "VAE", "A faster copy of the VAE, if one is connected."),
            _TEXT,
        ),
        _optimize,
    ),
    Node(
        "SdfastgnOptimizeVAE",
        "sdfastgn Optimize VAE",
        "Makes a VAE faster: decoding and encoding on fused channels-last kernels. Once the VAE has run, the "
        "text on the node says what became faster.",
        (_VAE, _PLANS_INPUT),
        (Output("vae", "VAE", "A faster copy. The VAE that came in stays as it was."), _TEXT),
        _optimize_vae,
    ),
    Node(
        # ComfyUI's page sorts the nodes whose names begin with what is searched by the length of the names.
        # With this one a search for "sdfastgn" finds sdfastgn Optimize first.
        "SdfastgnRunReport",
        "sdfastgn Run Report",
        "Reports on the last run of a model, and on a VAE if one is connected. Put it behind the sampler.",
        (
            _MODEL._replace(tooltip="The model that the sampler has run."),
            Input(
                "latent", "LATENT", "The sampler's result. It is passed on, and makes the node wait for it."
            ),
            _VAE._replace(tooltip="The VAE that decodes the latent.", is_optional=True),
        ),
        (Output("latent", "LATENT", "The latent that came in."), _TEXT),
        _report,
        always_runs=True,
    ),
)
