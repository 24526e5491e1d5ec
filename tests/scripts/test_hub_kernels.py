"""The package for Hugging Face's Kernel Hub: what it holds, and that ``kernels`` loads and uses it.

What loads it runs in a process of its own: a kernel registers ops and stays in ``sys.modules``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import tomllib
import torch

import sdfastgn
from sdfastgn.kernels.common.activations import ACTIVATIONS
from tests.command_line import ROOT, exit_code
from tests.processes import process

# Without the package, its name is that of the root's link, which is a namespace without a file.
needs_kernels = pytest.mark.skipif(
    getattr(importlib.util.find_spec("kernels"), "origin", None) is None,
    reason="Hugging Face's package kernels is not installed",
)
VARIANTS = ("torch-cpu", "torch-cuda")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("hub") / "hub-kernels"
    with pytest.MonkeyPatch.context() as patches:
        assert exit_code(patches, "build_hub_kernels.py", "--output", str(output)) == 0
    return output


def python(hub: Path, code: str, *paths: Path, **environment: str) -> str:
    """Standard output of ``code`` in a new interpreter that has ``hub`` and no network."""
    before = f"import sys, torch\nfrom pathlib import Path\nfrom torch import nn\nhub = Path({str(hub)!r})\n"
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(map(str, paths)), **environment}
    done = process(sys.executable, "-c", before + code, cwd=hub.parent, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- what is written


def imports_of(path: Path) -> set[str]:
    """Top-level names of the absolute imports of a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_imports_itself_torch_and_triton(hub, variant):
    files = list((hub / "build" / variant).rglob("*.py"))
    assert len(files) > 40
    found = set().union(*map(imports_of, files))
    assert found - sys.stdlib_module_names == {"torch", "triton"}


def test_the_kernels_are_those_of_the_package(hub):
    """Only imports differ, and the name of the namespace."""

    def text(path: Path) -> str:
        return re.sub(r"from (sdfastgn\.kernels\.|\.+)|_NAMESPACE = .*", "", path.read_text("utf-8"))

    made = hub / "build" / "torch-cuda"
    sources = {
        path.relative_to(ROOT / "sdfastgn/kernels"): path
        for path in (ROOT / "sdfastgn/kernels").rglob("*.py")
    }
    shared = [name for name in sources if (made / name).exists()]
    assert {str(name.parent) for name in shared} >= {"common", "group_norm", "layer_norm", "statistics"}
    assert all(text(made / name) == text(sources[name]) for name in shared)


def test_each_build_has_a_namespace_of_its_own(hub):
    found = [
        re.search(r'_NAMESPACE = "(.*)"', (hub / "build" / v / "_ops.py").read_text())[1] for v in VARIANTS
    ]
    assert [name.rpartition("_")[0] for name in found] == ["_sdfastgn_cpu", "_sdfastgn_cuda"]
    assert not (hub / "torch-ext/sdfastgn/_ops.py").exists()  # kernel-builder writes it


def test_the_card_has_every_name_and_the_measured_times(hub):
    card = (hub / "CARD.md").read_text("utf-8")
    [public] = re.findall(
        r"__all__ = (\[.*?\])", (hub / "torch-ext/sdfastgn/__init__.py").read_text(), re.DOTALL
    )
    layers = re.findall(r"^class (\w+)", (hub / "torch-ext/sdfastgn/layers.py").read_text(), re.MULTILINE)
    named = set(re.findall(r"^\| `(\w+)` \|", card, re.MULTILINE))
    assert named == {*ast.literal_eval(public), *layers} - {"layers"}
    functions = (getattr(sdfastgn, name) for name in sdfastgn.__all__ if name != "__version__")
    assert {f.__name__ for f in functions if f.__module__.startswith("sdfastgn.kernels.")} < named
    [activations] = re.findall(r"^Activations are (.*?)\.", card, re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", activations) == list(ACTIVATIONS)
    assert re.search(r"^\| 2x320x64x64 \|.*NVIDIA H200", card, re.MULTILINE | re.DOTALL)
    assert "$" not in card
    assert (hub / "build/CARD.md").read_text("utf-8") == card


def test_the_project_has_what_kernel_builder_reads(hub):
    """It refuses a project without flake.nix, and it uploads to the branch of the version."""
    general = tomllib.loads((hub / "build.toml").read_text())["general"]
    assert (general["edition"], general["backends"]) == (5, [v.removeprefix("torch-") for v in VARIANTS])
    assert (hub / "torch-ext" / general["name"] / "__init__.py").exists()
    assert "genKernelFlakeOutputs" in (hub / "flake.nix").read_text()


# ---- what ``kernels`` says to it


@pytest.mark.slow
@needs_kernels
def test_its_validators_accept_it(hub):
    code = """
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
assert [str(backend).lower() for backend in Build.open(hub).general.backends] == ["cpu", "cuda"]
for variant in sorted((hub / "build").glob("torch-*")):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    print(variant.name, str(metadata.name), metadata.version, metadata.license)
"""
    assert python(hub, code).splitlines() == [f"{variant} sdfastgn 0 Apache-2.0" for variant in VARIANTS]


# From here on these packages launch kernels on the CPU, which Triton's interpreter runs. The list
# grows by the package's name with each launch.
INTERPRET = """
import importlib

def interpret(*packages):
    launches = []
    for package in packages:
        dispatch, launch = (
            importlib.import_module(f"{package}.common.{name}") for name in ("dispatch", "launch")
        )
        dispatch.is_supported = lambda x: True

        def counted(self, *args, package=package, run=launch.Launch.__call__):
            launches.append(package)
            run(self, *args)

        launch.Launch.__call__ = counted
    return launches
"""


@pytest.mark.slow
@needs_kernels
def test_it_computes_what_the_package_computes(hub):
    """Bit for bit, beside the package and another build in one process."""
    code = """
import kernels, sdfastgn, sdfastgn.kernels.group_norm.op
first, second = (kernels.get_local_kernel(hub / "build" / name) for name in ("torch-cpu", "torch-cuda"))
assert first.__name__ != second.__name__
x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
weight, bias = torch.randn(2, 8)

def results(module, namespace):
    leaf = x.clone().requires_grad_()
    y = module.group_norm(leaf, 4, weight, bias, activation="silu")
    normed = module.layer_norm(y.movedim(1, -1), weight, bias)
    (gradient,) = torch.autograd.grad(normed.square().sum(), leaf)
    op = getattr(torch.ops, namespace).group_norm
    return y, normed, gradient, op(x, 4, weight, bias, 1e-5, "silu", None, None, None, None, False, None)[0]

def same():
    expected = results(sdfastgn, "sdfastgn")
    for module in (first, second):
        assert all(map(torch.equal, results(module, module.__name__), expected))
    return expected[0]

stock = nn.functional.silu(nn.functional.group_norm(x, 4, weight, bias))
torch.testing.assert_close(same(), stock, atol=1e-5, rtol=1e-5)
packages = "sdfastgn.kernels", first.__name__, second.__name__
launches = interpret(*packages)
torch.testing.assert_close(same(), stock, atol=1e-5, rtol=1e-5)
assert set(launches) == set(packages)
"""
    python(hub, INTERPRET + code, ROOT, TRITON_INTERPRET="1")


MODEL = """
import kernels
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping

class GroupNormSiLU(nn.GroupNorm):
    def forward(self, input):
        return nn.functional.silu(super().forward(input))

class NormSiLU(WanRMS_norm):
    def forward(self, x):
        return nn.functional.silu(super().forward(x))

layers = {nn.GroupNorm: "GroupNorm", GroupNormSiLU: "GroupNormSiLU", nn.LayerNorm: "LayerNorm"}
layers |= {WanRMS_norm: "ChannelNorm", NormSiLU: "ChannelNormSiLU"}
for cls, name in layers.items():
    replace_kernel_forward_from_hub(cls, name)
device = "cpu" if "interpret" in globals() else "cuda"
mapping = {name: {device: LocalLayerRepository(hub, layer_name=name)} for name in layers.values()}
norms = nn.GroupNorm(4, 8), GroupNormSiLU(2, 8, affine=False), nn.LayerNorm((8, 5, 6)), nn.LayerNorm(6)
norms += WanRMS_norm(8), NormSiLU(8, bias=True), WanRMS_norm(6, channel_first=False)
model = nn.Sequential(nn.Conv2d(3, 8, 3), *norms).to(device)
for p in model.parameters():
    p.data = torch.randn_like(p)
x = torch.randn(2, 3, 7, 8, device=device)

def outcome(model):
    y = model(x)
    return y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))

stock = outcome(model)
with use_kernel_mapping(mapping, inherit_mapping=False):
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device, use_fallback=False)
[package] = {module.forward.__func__.__module__.rpartition(".")[0] for module in norms}
assert package.startswith("_sdfastgn_")

def agrees(model):
    for a, b in zip(outcome(model), stock, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)

agrees(model)
agrees(torch.compile(model, backend="aot_eager", fullgraph=True))
"""


@pytest.mark.slow
@needs_kernels
def test_kernelize_gives_its_layers_to_a_model(hub):
    code = """
launches = interpret(package)
agrees(model)
assert launches
try:
    norms[2](torch.randn(2, 8, 6, 5))
except ValueError as error:
    print(error)
"""
    error = "sdfastgn.layers.LayerNorm: input must end in (8, 5, 6), got shape (2, 8, 6, 5)"
    assert python(hub, INTERPRET + MODEL + code, TRITON_INTERPRET="1") == error


@pytest.mark.slow
@needs_kernels
def test_its_own_tests_pass(hub):
    """As kernel-builder runs them."""
    code = """
import pytest
options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-m", "kernels_ci"]
sys.exit(pytest.main([*options, str(hub / "tests")]))
"""
    told = python(hub, code, LOCAL_KERNELS=f"sdfastgn/sdfastgn={hub}")
    assert re.search(r"^4 passed", told, re.MULTILINE)


@needs_kernels
@pytest.mark.gpu
def test_kernelized_layers_on_the_gpu(hub):
    python(hub, MODEL)


@pytest.mark.slow
@needs_kernels
def test_the_code_of_the_card_runs(hub):
    """``LOCAL_KERNELS`` has the build stand for the repository. Its version is a branch there."""
    card = (hub / "CARD.md").read_text("utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", card, re.DOTALL))
    assert code.count("version=0") == 2
    code = re.sub(r"(layer_name=.*?)version=0", r'\1revision="v0"', code)
    if not torch.cuda.is_available():
        code = code.replace(".cuda()", "").replace('"cuda"', '"cpu"')
    used = "\nassert model[1].forward.__func__.__module__.startswith('_sdfastgn_')\nprint(tuple(y.shape))"
    shape = python(hub, code + used, LOCAL_KERNELS=f"sdfastgn/sdfastgn={hub}")
    assert shape == "(2, 320, 64, 64)"
