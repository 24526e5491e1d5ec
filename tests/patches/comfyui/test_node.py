"""The nodes, as ComfyUI itself loads them from ``custom_nodes``."""

import asyncio
import importlib.util
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

import sdfastgn
from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

import comfy.sd  # noqa: E402
import nodes  # noqa: E402
import tomllib  # noqa: E402  # Python 3.10, which has none, skips before this
from comfy import model_management  # noqa: E402
from comfy_api.latest import io  # noqa: E402

from tests.patches.comfyui import comfy_models  # noqa: E402
from tests.patches.comfyui.comfy_models import close, image_of, latent_of  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu

FOLDER = Path(__file__).resolve().parents[3] / "integrations" / "comfyui"
NAMES = {
    "SdfastgnOptimize": "sdfastgn Optimize",
    "SdfastgnOptimizeVAE": "sdfastgn Optimize VAE",
    "SdfastgnRunReport": "sdfastgn Run Report",
}

OUTPUTS = {
    "SdfastgnOptimize": ["model", "vae", "text"],
    "SdfastgnOptimizeVAE": ["vae", "text"],
    "SdfastgnRunReport": ["latent", "text"],
}


@pytest.fixture(scope="module", autouse=True)
def loaded():
    assert asyncio.run(nodes.load_custom_node(str(FOLDER)))


def of_the_older_schema():
    """The node classes that releases without the V3 schema load."""
    spec = importlib.util.spec_from_file_location("older_nodes", FOLDER / "__init__.py")
    package = importlib.util.module_from_spec(spec)
    sys.modules["older_nodes"] = package
    api = sys.modules.pop("comfy_api.latest", None)
    sys.modules["comfy_api.latest"] = None  # importing it fails, as it does in those releases
    try:
        spec.loader.exec_module(package)
    finally:
        sys.modules["comfy_api.latest"] = api
    return package.NODE_CLASS_MAPPINGS


@pytest.fixture(params=["V1", "V3"])
def node(request):
    """A function that runs a node with the id 5:7 as ComfyUI's executor does: (outputs, text on the node)."""
    kinds = of_the_older_schema() if request.param == "V1" else nodes.NODE_CLASS_MAPPINGS

    def call(name, **inputs):
        kind = kinds[name]
        asked = kind.INPUT_TYPES()
        assert asked["required"].keys() <= inputs.keys() <= {*asked["required"], *asked.get("optional", ())}
        with torch.inference_mode():
            if request.param == "V1":
                found = getattr(kind(), kind.FUNCTION)(node_id="5:7", **inputs)
                return found["result"], found["ui"]["text"]
            hidden = {io.Hidden.unique_id: "5:7"}
            clone = kind.PREPARE_CLASS_CLONE({"hidden_inputs": hidden, **hidden})  # 0.3.64 has no outer dict
            executed = clone.EXECUTE_NORMALIZED(**inputs)
            return executed.result, executed.ui.as_dict()["text"]

    return call


@pytest.mark.parametrize("cuda_graphs", ["auto", "at once", "never"])
def test_a_workflow(node, cuda_graphs):
    model, vae = comfy_models.load_model("sd15"), comfy_models.load_vae()
    latent = latent_of(model, "sd15")
    image = image_of(vae, latent)
    (faster, faster_vae, text), shown = node(
        "SdfastgnOptimize", model=model, vae=vae, cuda_graphs=cuda_graphs
    )
    assert list(shown) == [text]
    assert [line.split(":")[0] for line in text.splitlines()] == ["UNetModel", "AutoencoderKL"]
    found = latent_of(faster, "sd15")
    close(found, latent)
    close(image_of(faster_vae, latent), image)
    samples = {"samples": found}
    (passed_on, text), shown = node("SdfastgnRunReport", model=faster, latent=samples)
    assert passed_on is samples
    assert list(shown) == [text]


def test_without_a_vae(node):
    model = comfy_models.load_model("sd15")
    (faster, vae, text), _ = node("SdfastgnOptimize", model=model, cuda_graphs="auto")
    assert (faster.model is model.model, vae, text.count("\n")) == (True, None, 0)


def test_a_vae_alone(node):
    vae, latent = comfy_models.load_vae(), torch.ones(1, 4, 8, 8)
    (faster, text), shown = node("SdfastgnOptimizeVAE", vae=vae)
    assert list(shown) == [text]
    close(image_of(faster, latent), image_of(vae, latent))


@pytest.fixture
def shown(monkeypatch):
    """The texts that the page has got for the node with id 5:7, the latest last."""
    texts = []

    class Server:
        client_id = "page"  # the page that runs the workflow

        @staticmethod
        def send_sync(event, data, sid=None):
            assert (event, data["node"], sid) == ("sdfastgn.text", "5:7", "page")
            texts.append(data["text"])

    monkeypatch.setitem(sys.modules, "server", type(sys)("server"))
    monkeypatch.setattr(
        sys.modules["server"], "PromptServer", type("PromptServer", (), {"instance": Server}), raising=False
    )
    return texts


def test_the_sampler_and_the_vae_renew_the_text_on_the_node(node, shown, gpu_at_hand):
    model, vae = comfy_models.load_model("sd15"), comfy_models.load_vae()
    (faster, faster_vae, text), _ = node("SdfastgnOptimize", model=model, vae=vae, cuda_graphs="never")
    assert text.count(": faster whenever all of it is loaded\n") == 2
    latent = latent_of(faster, "sd15")
    assert re.match(r"UNetModel: faster\n(.|\n)*\nAutoencoderKL: faster whenever all", shown.pop())
    for _ in range(2):  # a later prompt shows the first text again, and then has to renew it
        image_of(faster_vae, latent)
        assert re.match(r"UNetModel: faster\n(.|\n)*\nAutoencoderKL: faster\n", shown.pop())
    assert not shown


def test_a_report_on_a_vae_is_renewed_when_the_vae_runs(node, shown, gpu_at_hand):
    model, vae = comfy_models.load_model("sd15"), comfy_models.load_vae()
    (faster, faster_vae, _), _ = node("SdfastgnOptimize", model=model, vae=vae, cuda_graphs="never")
    latent = latent_of(faster, "sd15")
    for verdict in ("faster whenever all of it is loaded", "faster"):
        shown.clear()
        inputs = {"model": faster, "latent": {"samples": latent}, "vae": faster_vae}
        (_, text), _ = node("SdfastgnRunReport", **inputs)
        assert re.match(rf"UNetModel: faster\n(.|\n)*\nAutoencoderKL: {verdict}\n", text)
        image_of(faster_vae, latent)
        of_optimize, of_report = shown  # each text is sent once, however often the report runs
        assert of_optimize == of_report
        assert re.match(r"UNetModel: faster\n(.|\n)*\nAutoencoderKL: faster\n", of_report)


def test_the_first_text_holds_after_the_run_too(node, shown, gpu_at_hand):
    """ComfyUI's history keeps it, and so shows it to those who call ComfyUI's API."""
    model = comfy_models.load_model("sd15")
    for _ in range(2):  # the second time, the calls of the first run have been counted
        (faster, _, text), _ = node("SdfastgnOptimize", model=model, cuda_graphs="never")
        verdict, fused = text.splitlines()
        assert verdict == "UNetModel: faster whenever all of it is loaded"
        assert fused.startswith("Fused: ")
        latent_of(faster, "sd15")
        assert "Last run: 0 of 2 calls" in shown.pop()
        model_management.unload_all_models()


@pytest.mark.parametrize("name", ["SdfastgnOptimize", "SdfastgnOptimizeVAE", "SdfastgnRunReport"])
def test_a_checkpoint_without_a_vae(node, name):
    model, vae = comfy_models.load_model("sd15"), comfy.sd.VAE(sd={})  # as ComfyUI's loader makes it
    inputs = {
        "SdfastgnOptimize": {"model": model, "cuda_graphs": "auto"},
        "SdfastgnOptimizeVAE": {},
        "SdfastgnRunReport": {"model": model, "latent": {}},
    }[name]
    with pytest.raises(ValueError, match=r"^sdfastgn: the VAE is empty .*Load a VAE with the node Load VAE"):
        node(name, vae=vae, **inputs)
    with pytest.raises(TypeError, match=r"^sdfastgn: expected a VAE of ComfyUI, got str$"):
        node(name, vae="vae", **inputs)


def test_a_vae_alone_renews_its_text(node, shown, gpu_at_hand):
    vae, latent = comfy_models.load_vae(), torch.ones(1, 4, 8, 8)
    (faster, text), _ = node("SdfastgnOptimizeVAE", vae=vae)
    (again, _), _ = node("SdfastgnOptimizeVAE", vae=faster)
    assert text.startswith("AutoencoderKL: faster whenever all of it is loaded\n")
    for _ in range(2):
        image_of(again, latent)
        assert shown.pop().startswith("AutoencoderKL: faster\n")
        assert not shown  # the copy of a copy sends one text
    image_of(vae, latent)
    assert not shown


@pytest.mark.parametrize("schema", ["V1", "V3"])
def test_everything_has_a_tooltip(schema):
    kinds = of_the_older_schema() if schema == "V1" else nodes.NODE_CLASS_MAPPINGS
    for name in NAMES:
        kind = kinds[name]
        assert kind.DESCRIPTION
        inputs = kind.INPUT_TYPES()
        options = [each[1] for part in ("required", "optional") for each in inputs.get(part, {}).values()]
        assert all(each.get("tooltip") for each in options)
        assert len(kind.OUTPUT_TOOLTIPS) == len(kind.RETURN_NAMES) == len(kind.RETURN_TYPES)
        assert all(kind.OUTPUT_TOOLTIPS)
        assert list(kind.RETURN_NAMES) == OUTPUTS[name]
    assert NAMES.items() <= nodes.NODE_DISPLAY_NAME_MAPPINGS.items()


def test_the_report_is_made_anew_in_each_prompt():
    older = of_the_older_schema()["SdfastgnRunReport"].IS_CHANGED()
    newer = nodes.NODE_CLASS_MAPPINGS["SdfastgnRunReport"].fingerprint_inputs()
    assert older != older  # NaN
    assert newer != newer


@pytest.mark.parametrize("lacks", ["sdfastgn", "triton"])
def test_what_is_missing_is_said_when_comfyui_loads_the_folder(lacks, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacks else find(name))
    monkeypatch.setattr(PathFinder, "find_spec", lambda *_: None)
    spec = importlib.util.spec_from_file_location("without", FOLDER / "__init__.py")
    with pytest.raises(ImportError, match=f"sdfastgn (is not installed|needs {lacks.title()})"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_its_version_is_the_packages():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == sdfastgn.__version__
    assert "comfyui" not in project["project"]["name"].lower()
    assert (FOLDER / project["tool"]["comfy"]["Icon"]).is_file() or "://" in project["tool"]["comfy"]["Icon"]
