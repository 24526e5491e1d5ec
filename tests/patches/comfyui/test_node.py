"""The nodes, as ComfyUI itself loads them from ``custom_nodes``."""

import asyncio
from pathlib import Path

import pytest
import torch

import sdfastgn
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import nodes  # noqa: E402
import tomllib  # noqa: E402  # Python 3.10, which has none, skips before this

from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import close, image_of, latent_of  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu

FOLDER = Path(__file__).resolve().parents[3] / "integrations" / "comfyui"


@pytest.fixture(scope="module", autouse=True)
def loaded():
    assert asyncio.run(nodes.load_custom_node(str(FOLDER)))


def node(name):
    """A function that calls the node as ComfyUI's executor does, with keyword arguments."""
    kind = nodes.NODE_CLASS_MAPPINGS[name]

    def call(**inputs):
        asked = kind.INPUT_TYPES()
        assert asked["required"].keys() <= inputs.keys() <= {*asked["required"], *asked.get("optional", ())}
        with torch.inference_mode():
            return getattr(kind(), kind.FUNCTION)(**inputs)

    return call


@pytest.mark.parametrize("cuda_graphs", ["auto", "at once", "never"])
def test_a_workflow(cuda_graphs):
    model, vae = comfy_models.load_model("sd15"), comfy_models.load_vae()
    latent = latent_of(model, "sd15")
    image = image_of(vae, latent)
    faster, faster_vae, text = node("SdfastgnOptimize")(model=model, vae=vae, cuda_graphs=cuda_graphs)
    assert text.count("to be fused once it is loaded") == 2
    assert (
        cuda_graphs
        in nodes.NODE_CLASS_MAPPINGS["SdfastgnOptimize"].INPUT_TYPES()["required"]["cuda_graphs"][0]
    )
    found = latent_of(faster, "sd15")
    close(found, latent)
    close(image_of(faster_vae, latent), image)
    report = node("SdfastgnReport")(model=faster, latent={"samples": found})
    assert report["result"][0]["samples"] is found
    assert "UNetModel: fused: " in report["result"][1]
    assert report["ui"] == {"text": [report["result"][1]]}


def test_without_a_vae():
    model = comfy_models.load_model("sd15")
    faster, vae, text = node("SdfastgnOptimize")(model=model, cuda_graphs="auto")
    assert (faster.model is model.model, vae, text.count("\n")) == (True, None, 1)


def test_outputs_are_named():
    for kind in (nodes.NODE_CLASS_MAPPINGS[name] for name in ("SdfastgnOptimize", "SdfastgnReport")):
        assert len(kind.RETURN_TYPES) == len(kind.RETURN_NAMES)
        assert nodes.NODE_DISPLAY_NAME_MAPPINGS[f"Sdfastgn{kind.__name__}"] == f"sdfastgn {kind.__name__}"


def test_its_version_is_the_packages():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = (FOLDER / "requirements.txt").read_text(encoding="utf-8").split()
    assert project["project"]["version"] == sdfastgn.__version__
    assert project["project"]["dependencies"] == requirements == [f"sdfastgn>={sdfastgn.__version__}"]
    assert project["tool"]["comfy"]["DisplayName"] == "sdfastgn"
