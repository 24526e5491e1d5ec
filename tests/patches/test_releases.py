"""In the installed diffusers all code that fusions rely on is known, and every part of a model is fused."""

import ast
import copy
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
import warnings

import diffusers
import pytest
import torch

import sdfastgn
from sdfastgn import api
from sdfastgn.models.architectures import build_unet, build_vae
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.graphs.factors import readers
from sdfastgn.patches.registry import FUSIONS, OBJECT_FUSIONS
from sdfastgn.patches.swap import tested_sources
from sdfastgn.patches.swap.tested_sources import unknown_source
from tests.controlnet import build_controlnet
from tests.patches.samples import make_unknown

pytestmark = pytest.mark.fused_on_cpu


@pytest.mark.parametrize("fusion", [*FUSIONS, *OBJECT_FUSIONS, *readers()], ids=lambda fusion: fusion.name)
def test_every_source_is_known(fusion):
    """If it fails after an upgrade: read the change, adapt the fused forward, accept the new code."""
    assert [unknown_source(source) for source in fusion.sources] == [None] * len(fusion.sources)
    without = ("group_norm", "group_norm_subclass", "sequential")
    assert fusion.sources or fusion.name in without


def test_fusions_and_the_file_name_the_same_methods():
    """ComfyUI's are in ``tests/cli/test_sources.py``."""
    sources = [source for fusion in (*FUSIONS, *OBJECT_FUSIONS, *readers()) for source in fusion.sources]
    asked = {(tested_sources.upstream_name(cls), method) for cls, methods in sources for method in methods}
    versions = tested_sources.tested_versions()
    assert asked == {
        (name, method) for name in versions if name.startswith("diffusers.") for method in versions[name]
    }
    assert {name.partition(".")[0] for name in versions} == {"diffusers", "comfy"}


# (builder, model) -> parts that are fused in every release.
PARTS = {
    (build_unet, "sd15"): 171,
    (build_unet, "sdxl"): 360,
    (build_controlnet, "sd15"): 72,
    (build_controlnet, "sdxl"): 170,
    (build_vae, "sd15"): 85,
    (build_vae, "sdxl"): 85,
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("case", "parts"), PARTS.items(), ids=[f"{build.__name__}-{model}" for build, model in PARTS]
)
def test_every_part_of_a_model_is_fused(case, parts):
    build, model = case
    report = sdfastgn.report(build(model, torch.float16, "meta"))
    assert (len(report.fusable), report.skipped) == (parts, ())


@pytest.fixture
def said(monkeypatch):
    """Returns a function: it calls its argument, and returns the warnings about code that is unknown."""
    monkeypatch.setattr(api, "noted", set(api._machine_notes()))  # what other tests have noted is forgotten

    def said_by(call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        return [w for w in caught if "was not tested with the installed code" in str(w.message)]

    return said_by


def blocks_of(*objs):
    return [inner for obj in objs for inner in obj.modules() if type(inner).__name__ == "ResnetBlock2D"]


def test_one_warning_names_the_unknown_code_of_all_components(said, monkeypatch):
    pipe = build_pipeline("tiny", dtype=torch.float32, device="cpu")
    twin = copy.deepcopy(pipe)
    scheduler = type(pipe.scheduler).__name__
    assert not said(lambda: sdfastgn.restore(sdfastgn.optimize(pipe)))
    make_unknown(monkeypatch, "ResnetBlock2D.forward")
    make_unknown(monkeypatch, f"{scheduler}.step")
    parts = len(sdfastgn.report(pipe).entries)
    [warned] = said(lambda: sdfastgn.optimize(sdfastgn.optimize(pipe)))
    assert (warned.category, warned.filename) == (UserWarning, __file__)
    blocks = len(blocks_of(pipe.unet, pipe.vae))
    assert blocks > 10
    text = str(warned.message)
    share = f"{blocks + 2} of {parts} parts run stock's code, at stock's speed"  # tiled decode is one of them
    assert text.startswith(f"sdfastgn.optimize: {share}")
    assert f"code of ResnetBlock2D.forward ({blocks + 1} parts), {scheduler}.step (1 part). " in text
    assert f"Either diffusers {diffusers.__version__} is newer than sdfastgn, or other code has repl" in text
    newest = tested_sources.newest_release("diffusers")
    advice = ("sdfastgn.report", "a newer sdfastgn", f"diffusers {newest} or older", "`sdfastgn sources`")
    assert all(words in text for words in advice)
    assert not said(lambda: sdfastgn.optimize(twin))
    assert not said(sdfastgn.optimized(twin).__enter__)


def test_the_with_block_warns_in_its_own_name_and_of_new_methods_only(said, monkeypatch):
    unet, vae = build_unet("tiny", torch.float32, "cpu"), build_vae("tiny", torch.float32, "cpu")

    def block(obj):
        with sdfastgn.optimized(obj):
            pass

    make_unknown(monkeypatch, "ResnetBlock2D.forward")
    [warned] = said(lambda: block(unet))
    assert str(warned.message).startswith("sdfastgn.optimized: ")
    assert warned.filename == __file__
    assert not said(lambda: block(vae))
    make_unknown(monkeypatch, "Upsample2D.forward")
    [warned] = said(lambda: block(vae))
    assert re.search(r"Upsample2D\.forward \(\d+ parts\)", str(warned.message))


def test_a_method_that_other_code_replaced_is_named(said, monkeypatch):
    forward = diffusers.models.resnet.ResnetBlock2D.forward
    monkeypatch.setattr(diffusers.models.resnet.ResnetBlock2D, "forward", lambda *args: forward(*args) * 2)
    vae = build_vae("tiny", torch.float32, "cpu")
    [warned] = said(lambda: sdfastgn.optimize(vae))
    assert "ResnetBlock2D.forward (" in str(warned.message)
    assert "ResnetBlock2D.forward of this diffusers is not" in json.dumps(sdfastgn.report(vae).to_dict())


def test_unknown_code_is_an_error_alone_if_strict(said, monkeypatch):
    make_unknown(monkeypatch, "ResnetBlock2D.forward")

    def refused():
        with pytest.raises(
            ValueError, match=r"^sdfastgn\.optimize: strict=True and .* ResnetBlock2D\.forward"
        ):
            sdfastgn.optimize(build_unet("tiny", torch.float32, "cpu"), strict=True)

    assert not said(refused)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gone",
    [
        "diffusers.models.resnet:ResnetBlock2D",
        "diffusers.models.upsampling",
    ],
)
def test_a_class_that_a_release_lacks_costs_its_own_fusions_alone(gone):
    """This runs in a separate process, because fusions are imported once."""
    code = f"""
import sys, warnings, importlib
module, _, name = {gone!r}.partition(":")
import diffusers.models.unets.unet_2d_condition
if name:
    delattr(importlib.import_module(module), name)
else:
    sys.modules[module] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import sdfastgn
    sdfastgn.optimize
from sdfastgn.patches.registry import FUSIONS, MISSING
print([str(w.message) for w in caught if "left out" in str(w.message)])
print(*MISSING, len(FUSIONS))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    warning, rest = done.stdout.strip().splitlines()[-2:]
    *missing, count = rest.split()
    assert all(file in warning for file in missing)
    assert warning.count("this diffusers lacks what some fusions replace") == 1
    # Fusions of autoencoders that import a file which imports the class.
    of_videos = [f for f in FUSIONS if ".autoencoder_kl_" in getattr(f, "stock", object).__module__]
    files = {f.fused.__module__.removeprefix("sdfastgn.patches.") for f in of_videos}
    assert missing
    assert len({*missing} - files) < 5
    assert len(FUSIONS) - int(count) <= 5 + len(of_videos)


def read_by_tokens(function):
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return ast.dump(definition)


def test_sources_are_read_without_tokens(monkeypatch):
    """``inspect.getsource`` takes most of the time. It gives the same code."""
    sources = [source for fusion in (*FUSIONS, *OBJECT_FUSIONS) for source in fusion.sources]
    methods = [getattr(cls, name) for cls, names in sources for name in names]
    functions = [inspect.unwrap(f.fget if isinstance(f, property) else f) for f in methods]
    expected = list(map(read_by_tokens, functions))
    monkeypatch.setattr(inspect, "getsource", None)
    assert [ast.dump(tested_sources.definition_of(f)) for f in functions] == expected


METHODS = '''
class Block:
    @staticmethod
    @torch.no_grad()
    # A comment.
    def forward(
        x,  # the input
    ) -> None:
        def inner():
            return x
        if x:
            x = 1
    # A comment that is further left.
            pass
        else: pass

        # Another one.
    def text(self):
        return self
        """
    further left
    """
    def short(self): "Says nothing."
    async def later(self):
        await self
    function = lambda self: self
'''


def test_any_layout_of_a_function_is_read(tmp_path, monkeypatch):
    (tmp_path / "a_release.py").write_text(f"import torch\n{METHODS}")
    monkeypatch.syspath_prepend(tmp_path)
    block = importlib.import_module("a_release").Block
    for function in map(inspect.unwrap, (block.forward, block.text, block.short)):
        assert ast.dump(tested_sources.definition_of(function)) == read_by_tokens(function)
    assert not any(map(tested_sources.definition_of, (block.later, block.function, block, len, None)))


DEFINITION = """
@torch.no_grad()
def f(self, x, *, scale=1.5, **options):
    if not (y := x * self.weight[..., None]).is_cuda:
        raise ValueError(f"{x.shape!r:>5} {{of}} {options['name']}" " is {no} é")
    return [*y, lambda: None, -1, b"", True, {**options}]
"""


def hash_of(source):
    [definition] = ast.parse(source).body
    return tested_sources.hash_of(definition)


def test_a_hash_is_the_same_in_every_python():
    assert hash_of(DEFINITION) == "e3324aa2beb0bed3"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("x, *", "x: 'Tensor', *", id="annotation"),
        pytest.param("options):", "options) -> list[int]:", id="annotation-of-what-is-returned"),
        pytest.param("options):", 'options):\n    """Says what it does."""', id="docstring"),
        pytest.param("options):", "options):  # says why", id="comment"),
        pytest.param("is_cuda:", "is_cuda:\n\n    ", id="layout"),
    ],
)
def test_what_computes_nothing_is_in_no_hash(old, new):
    assert DEFINITION.count(old) == 1
    assert hash_of(DEFINITION.replace(old, new)) == hash_of(DEFINITION)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1.5", "1.25"),
        ("True", "1"),
        ('b""', '""'),
        ("é", "e"),
        ("return", "yield"),
        ("-1", "+1"),
        ("lambda: None", "lambda: 0"),
        ("None]", "..., None]"),
        ("@torch.no_grad()", ""),
        ("*, scale", "scale"),
        ("{{of}}", "{{{of}}}"),
        ("!r", "!s"),
    ],
)
def test_what_computes_something_is_in_the_hash(old, new):
    assert DEFINITION.count(old) == 1
    assert hash_of(DEFINITION.replace(old, new)) != hash_of(DEFINITION)
