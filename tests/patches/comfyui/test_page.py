"""The nodes on ComfyUI's page, in a real browser, against a real server."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.patches.comfyui import comfy_checkout

comfy_checkout.import_for_cpu()

from tests.patches.comfyui import comfy_models  # noqa: E402

pytestmark = pytest.mark.fused_on_cpu
webdriver = pytest.importorskip("selenium.webdriver")

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / "integrations" / "comfyui" / "example_workflows").glob("*.json"))
LONG = 240  # seconds

try:
    version("comfyui-frontend-package")
except PackageNotFoundError:
    pytest.skip("ComfyUI's page is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server with a checkpoint, a LoRA and sdfastgn's nodes."""
    base = tmp_path_factory.mktemp("comfyui")
    for kind in ("checkpoints", "loras"):
        (base / "models" / kind).mkdir(parents=True)
    comfy_models.save_checkpoint(base / "models" / "checkpoints" / "tiny.safetensors")
    save_file(comfy_models.lora_file(), base / "models" / "loras" / "tiny.safetensors")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / "sdfastgn").symlink_to(ROOT / "integrations" / "comfyui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.patches.comfyui.serve", "--cpu", "--port", str(port)]
    command += ["--base-directory", str(base), "--disable-all-custom-nodes"]
    command += ["--whitelist-custom-nodes", "sdfastgn"]
    with open(base / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: "SdfastgnOptimize" in get(f"{address}/object_info/SdfastgnOptimize"), process)
        yield address
    except BaseException:
        print((base / "log").read_text()[-5000:])
        raise
    finally:
        process.kill()
        process.wait()


def get(address):
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)
    except OSError:
        return {}


def until(is_true, process=None):
    """Wait until ``is_true()``. Fails after ``LONG``, or when ``process`` ends."""
    end = time.monotonic() + LONG
    while not (found := is_true()):
        assert process is None or process.poll() is None, "the server has ended"
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.2)
    return found


def filled_in(path):
    """A workflow with the names of the files that the server has, and small images."""
    workflow = json.loads(path.read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        widgets = node["widgets_values"]
        if node["type"] in ("CheckpointLoaderSimple", "LoraLoader"):
            widgets[0] = "tiny.safetensors"
        elif node["type"] == "EmptyLatentImage":
            widgets[:2] = 64, 64
        elif node["type"] == "KSampler":
            widgets[2] = 2
    return workflow


# What the page shows on each of our nodes: its type -> its text.
TEXTS = """
const found = {};
for (const node of window.app.graph._nodes)
  for (const widget of node.widgets ?? [])
    if (widget.name === "sdfastgn_text") found[node.type] = widget.value;
return found;
"""

# Scales and moves the canvas, so that it shows all nodes.
SHOW_ALL = """
const canvas = window.app.canvas, nodes = window.app.graph._nodes;
const left = Math.min(...nodes.map(n => n.pos[0])) - 120, top = Math.min(...nodes.map(n => n.pos[1])) - 140;
const right = Math.max(...nodes.map(n => n.pos[0] + n.size[0])) + 60;
const bottom = Math.max(...nodes.map(n => n.pos[1] + n.size[1])) + 60;
const {clientWidth, clientHeight} = canvas.canvas;
canvas.ds.scale = Math.min(clientWidth / (right - left), clientHeight / (bottom - top));
canvas.ds.offset = [-left, -top];
canvas.setDirty(true, true);
"""


@pytest.fixture(scope="module")
def page(server, browser):
    browser.set_window_size(1900, 1100)
    browser.get(server)
    until(lambda: browser.execute_script("return Boolean(window.app && window.app.graph)"))
    return browser


def run(page, server, workflow):
    """Open ``workflow`` on the page and run it; the server's record of the run."""
    known = get(f"{server}/history").keys()
    page.execute_async_script(
        "const done = arguments[1]; window.app.loadGraphData(arguments[0])"
        ".then(() => window.app.queuePrompt(0, 1)).then(() => done(true))",
        workflow,
    )
    name = until(lambda: get(f"{server}/history").keys() - known).pop()
    return get(f"{server}/history/{name}")[name]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_example_runs_and_its_nodes_show_text(path, page, server):
    workflow = filled_in(path)
    record = run(page, server, workflow)
    assert record["status"]["status_str"] == "success", record["status"]
    assert any("images" in output for output in record["outputs"].values())
    ours = {node["type"] for node in workflow["nodes"] if node["type"].startswith("Sdfastgn")}
    texts = until(lambda: ours <= (found := page.execute_script(TEXTS)).keys() and found)
    if folder := os.environ.get("SCREENSHOTS"):
        webdriver.ActionChains(page).send_keys(
            webdriver.Keys.ESCAPE
        ).perform()  # closes the dialog with templates
        page.execute_script(SHOW_ALL)
        time.sleep(2)
        page.save_screenshot(f"{folder}/{path.stem}.png")
    assert texts["SdfastgnOptimize"].splitlines() == [
        "UNetModel: not faster. There is no CUDA GPU",
        "AutoencoderKL: not faster. There is no CUDA GPU",
    ]
    if "SdfastgnRunReport" in ours:
        assert texts["SdfastgnRunReport"] == texts["SdfastgnOptimize"]


def test_the_examples_are_offered(server):
    offered = get(f"{server}/workflow_templates")
    assert sorted(offered["sdfastgn"]) == sorted(path.stem for path in WORKFLOWS)


def test_a_node_in_a_subgraph_shows_its_new_text(page, server):
    workflow = filled_in(WORKFLOWS[0])
    page.execute_async_script(
        "window.app.loadGraphData(arguments[0]).then(() => arguments[1](true))",
        workflow,
    )
    outer, inner = page.execute_script(
        "const graph = window.app.graph, inner = graph._nodes.find(each => each.type === 'SdfastgnOptimize');"
        "window.outer = graph.convertToSubgraph(new Set([inner])).node;"
        "return [window.outer.id, window.outer.subgraph._nodes[0].id]"
    )
    known = get(f"{server}/history").keys()
    page.execute_script("window.app.queuePrompt(0, 1)")
    name = until(lambda: get(f"{server}/history").keys() - known).pop()
    record = get(f"{server}/history/{name}")[name]
    assert record["status"]["status_str"] == "success", record["status"]
    assert f"{outer}:{inner}" in record["outputs"]
    shown = (
        "window.app.api.dispatchEvent(new CustomEvent('sdfastgn.text', {detail: arguments[0]}));"
        "const widgets = window.outer.subgraph._nodes[0].widgets;"
        "return widgets.find(each => each.name === 'sdfastgn_text')?.value"
    )
    new = {"node": f"{outer}:{inner}", "text": "a new text"}
    assert page.execute_script(shown, new) == "a new text"
