"""``sdfastgn sources``: which upstream methods are unknown, what changed in them, and their acceptance."""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

import diffusers
import pytest
from diffusers.models.activations import GEGLU

from sdfastgn.cli.known_sources import text_of
from sdfastgn.patches.swap import tested_sources
from sdfastgn.patches.swap.tested_sources import hash_of, source_hash, unknown_source
from tests.command_line import invoke
from tests.processes import process

CLASS = "diffusers.models.activations.GEGLU"
OTHER_RELEASE = """
class GEGLU:
    def forward(self, hidden_states):
        '''Nobody reads this.'''
        return hidden_states + 28201
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "diffusers-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("diffusers/__init__.py", "")
        archive.writestr("diffusers/models/activations.py", OTHER_RELEASE)
    return path


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the hashes. GEGLU's ``forward`` is known only as another release has it."""
    versions = json.loads(tested_sources.FILE.read_text(encoding="utf-8"))
    [method] = ast.parse(OTHER_RELEASE).body[0].body
    versions[CLASS]["forward"] = [{"hash": hash_of(method), "first_seen": "0.1.0"}]
    path = tmp_path / "tested_sources.json"
    path.write_text(text_of(versions), encoding="utf-8")
    monkeypatch.setattr(tested_sources, "FILE", path)
    tested_sources.tested_versions.cache_clear()
    yield path
    tested_sources.tested_versions.cache_clear()


def test_all_are_known():
    result = invoke("sources")
    assert result.exit_code == 0
    assert re.fullmatch(r"diffusers \S+: (\d+) of \1 methods are known\n", result.stdout)


def test_the_file_is_as_accept_writes_it():
    text = tested_sources.FILE.read_text(encoding="utf-8")
    assert text == text_of(json.loads(text))


@pytest.mark.usefixtures("file")
def test_an_unknown_one_and_how_to_see_what_changed():
    result = invoke("sources")
    assert result.exit_code == 1
    assert f"{CLASS}.forward, for geglu: unknown ({source_hash(GEGLU, 'forward')})" in result.stdout
    assert "sdfastgn sources --against diffusers-0.1.0-py3-none-any.whl" in result.stdout


@pytest.mark.usefixtures("file")
def test_what_changed_since_a_release(wheel, tmp_path, monkeypatch):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    checkout = tmp_path / "checkout" / "diffusers"
    zipfile.ZipFile(wheel).extractall(checkout / "src")
    monkeypatch.chdir(tmp_path / "diffusers")
    places = (wheel, tmp_path, tmp_path / "diffusers", ".", checkout, checkout / "src" / "diffusers")
    shown = {invoke("sources", "--against", str(path)).stdout for path in places}
    [lines] = [each.splitlines() for each in shown]
    changed = [line.strip() for line in lines if line.startswith("    ")]
    assert changed[:2] == ["--- known", "+++ installed"]
    assert "-    return hidden_states + 28201" in changed
    assert any(line.startswith("+") and "self.proj(hidden_states)" in line for line in changed)
    assert "Nobody" not in str(changed)
    assert "--accept" in lines[-1]


def test_a_release_in_which_it_is_unknown_too(file, wheel):
    file.write_text(file.read_text(encoding="utf-8").replace("0.1.0", "0.0.9"), encoding="utf-8")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("diffusers/__init__.py", "")
    assert "    it is not known in that release either" in invoke("sources", "--against", str(wheel)).stdout


def test_accepted_it_is_one_line_more_and_known(file):
    before = file.read_text(encoding="utf-8").splitlines()
    result = invoke("sources", "--accept")
    assert result.exit_code == 0
    assert f"1 accepted, in {file}" in result.stdout
    after = file.read_text(encoding="utf-8").splitlines()
    entry = {"hash": source_hash(GEGLU, "forward"), "first_seen": diffusers.__version__}
    added = [line.strip() for line in after if line.rstrip(",") not in {each.rstrip(",") for each in before}]
    assert added == [json.dumps(entry)]
    assert len(after) == len(before) + 1
    tested_sources.tested_versions.cache_clear()
    assert unknown_source(tested_sources.TestedSource(GEGLU, ("forward",))) is None
    assert invoke("sources").exit_code == 0


def test_what_is_gone_cannot_be_accepted(monkeypatch, file):
    invoke("sources", "--accept")
    before = file.read_text(encoding="utf-8")
    monkeypatch.delattr(GEGLU, "gelu")
    result = invoke("sources", "--accept")
    assert result.exit_code == 1
    assert f"{CLASS}.gelu, for geglu: it is gone, or other code has replaced it" in result.stdout
    assert file.read_text(encoding="utf-8") == before


@pytest.mark.usefixtures("file")
def test_a_file_that_cannot_be_written(monkeypatch):
    tested_sources.tested_versions()
    monkeypatch.setattr(tested_sources, "FILE", Path("/proc/x.json"))
    result = invoke("sources", "--accept")
    assert result.exit_code == 2
    assert "sdfastgn: cannot write '/proc/x.json'" in result.output


_CLASSES = {
    "modules/attention": (
        "GEGLU",
        "BasicTransformerBlock",
        "CrossAttention",
        "FeedForward",
        "SpatialTransformer",
    ),
    "modules/diffusionmodules/openaimodel": ("ResBlock", "Upsample", "TimestepEmbedSequential", "UNetModel"),
    "modules/diffusionmodules/model": ("AttnBlock", "Decoder", "Encoder", "ResnetBlock", "Upsample"),
    "models/autoencoder": ("AutoencoderKL", "AutoencodingEngine"),
}
_LAYERS = ("Conv2d", "Linear", "GroupNorm", "LayerNorm")
# A checkout of ComfyUI with the classes that fusions replace, and no code in them. File -> text.
COMFYUI = {
    "comfyui_version.py": "__version__ = '9.9.9'",
    "comfy/cldm/cldm.py": "class ControlNet(nn.Module): ...",
    "comfy/cli_args.py": "",
    "comfy/model_management.py": "",
    "comfy/model_patcher.py": "class ModelPatcher: ...",
    "comfy/patcher_extension.py": "class CallbacksMP: ...\nclass WrappersMP: ...",
    "comfy/options.py": "def enable_args_parsing(): ...",
    "comfy/sample.py": "",
    "comfy/sd.py": "class VAE: ...",
    "comfy/utils.py": "",
    "comfy/ops.py": "\n".join(
        [
            "class disable_weight_init:",
            *(f"    class {name}(nn.{name}): ..." for name in _LAYERS),
            "class manual_cast:",
            *(f"    class {name}(disable_weight_init.{name}): ..." for name in _LAYERS),
        ]
    ),
} | {
    f"comfy/ldm/{file}.py": "\n".join(f"class {name}(nn.Module): ..." for name in names)
    for file, names in _CLASSES.items()
}
COMFYUI["comfy/ldm/modules/attention.py"] += "\ndef attention_pytorch(): ..."


@pytest.mark.slow
def test_comfyui_and_the_file_name_the_same_methods(tmp_path):
    for name, text in COMFYUI.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from torch import nn\n{text}\n", encoding="utf-8")
    done = process(sys.executable, "-m", "sdfastgn", "sources", "--comfyui", str(tmp_path))
    assert done.returncode == 1, done.stderr
    asked = {line.partition(",")[0] for line in done.stdout.splitlines() if line.startswith("comfy.")}
    versions = tested_sources.tested_versions()
    assert asked == {
        f"{name}.{method}" for name in versions if name.startswith("comfy.") for method in versions[name]
    }
    assert f"comfy 9.9.9: 0 of {len(asked)} methods are known" in done.stdout
    release = tested_sources.newest_release("comfy")
    assert "To see what changed: fetch comfy/ldm/models/autoencoder.py, comfy/" in done.stdout
    assert f"comfy/sd.py of ComfyUI {release} into a folder, then run `sdfastgn sources " in done.stdout
