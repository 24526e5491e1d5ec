"""The pages: their code runs, their commands are right, their links lead somewhere, their prose wraps."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import itertools
import re
import runpy
import shlex
from pathlib import Path
from unittest import mock

import click
import diffusers
import pytest
import tomllib
import torch
import torch.distributed.run
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement

import sdfastgn
from sdfastgn.cli import digits, session
from sdfastgn.cli.app import app, click_command
from sdfastgn.kernels.common import op as ops
from sdfastgn.models.pipelines import build_pipeline
from sdfastgn.patches.registry import FUSIONS
from tests.command_line import ROOT, exit_code, invoke
from tests.pages import BLOCKS, LANGUAGES, PAGES, commands, python_of, substitute
from tests.plugin import run_fused_on_cpu

README = PAGES["README.md"]
COMMANDS = commands()
PYTHON_PAGES = list(dict.fromkeys(block.page for block in BLOCKS if block.language == "python"))
TABLE = re.compile(r"<!-- table:(.*?) -->.*?<!-- /table:\1 -->", re.DOTALL)


class _Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, in which a tag names a Python function."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def shelves():
    """The pages of each section of the navigation. The overview and the API page are in no section."""
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _Settings)["nav"]
    return {
        name: [f"docs/{page}" for entry in entries for page in entry.values()]
        for section in navigation
        for name, entries in section.items()
        if isinstance(entries, list)
    }


SHELVES = shelves()
# Words of a page for use that somebody reads: without code, tables and front matter. Four minutes.
MOST_WORDS = 1000
# Pages for use: as many as somebody looks through in a list.
MOST_PAGES = 12


# ---- blocks


@pytest.fixture
def library(monkeypatch):
    """Ops that a page defines are gone after the test."""
    library = torch.library.Library("sdfastgn", "FRAGMENT")
    monkeypatch.setattr(ops, "_LIBRARY", library)
    yield
    library._destroy()


def of_the_readme(names, asked, printed):
    assert asked == ["stabilityai/stable-diffusion-xl-base-1.0"]
    assert names["image"].size == (64, 64)
    assert re.search(r"parts fused( where kernels run, none here)?, 0 skipped", printed)


def of_the_page_on_the_kernel_hub(names, asked, printed):
    [expected] = [b.code for b in BLOCKS if (b.page, b.language) == ("docs/hub-kernels.md", "text")]
    assert printed.endswith(expected)


def of_the_page_on_other_models(names, asked, printed):
    [expected] = [b.code for b in BLOCKS if (b.page, b.language) == ("docs/other-models.md", "text")]
    assert printed.startswith(expected)
    assert printed.endswith(".Louder is a subclass of GroupNorm\n")
    norm, y = names["norm"], names["y"]
    expected = torch.nn.functional.group_norm(names["x"].contiguous(), 32, norm.weight, norm.bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(names["tokens"].movedim(-1, 1).reshape(y.shape), expected)


def of_the_page_on_plans(names, asked, printed):
    [expected] = [b.code for b in BLOCKS if (b.page, b.language) == ("docs/plans.md", "text")]
    assert expected in printed


def for_the_kernel_hub(monkeypatch):
    """The build that the page loads. What it tells PyTorch's own class is gone after the test."""
    if getattr(importlib.util.find_spec("kernels"), "origin", None) is None:
        pytest.skip("Hugging Face's package kernels is not installed")
    assert exit_code(monkeypatch, "build_hub_kernels.py") == 0
    for name in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(torch.nn.GroupNorm, name, None, raising=False)


def for_the_page_on_diffusers(monkeypatch):
    """The kernels of this package stand for those of the Hub, and their calls are counted."""
    kernels = pytest.importorskip("kernels")
    if not hasattr(kernels, "get_kernel"):  # the link at the root
        pytest.skip("Hugging Face's package kernels is not installed")
    hub = mock.Mock(group_norm=mock.Mock(side_effect=sdfastgn.group_norm))
    monkeypatch.setattr(kernels, "get_kernel", mock.Mock(return_value=hub))


def of_the_page_on_diffusers(names, asked, printed):
    names["get_kernel"].assert_called_once()
    decoder = names["vae"].decoder
    blocks = [module for module in decoder.modules() if type(module) is names["ChangedBlock"]]
    assert blocks
    assert names["get_kernel"].return_value.group_norm.call_count == 2 * len(blocks)


def of_the_page_on_rules(names, asked, printed):
    """What the page does not run is in the file that it names."""
    blocks = [b for b in BLOCKS if b.page == "docs/writing-a-rule.md" and b.why_not]
    assert len(blocks) == 6
    for block in blocks:
        text = (ROOT / block.why_not.removeprefix("it is in ")).read_text(encoding="utf-8")
        assert " ".join(block.code.split()) in " ".join(text.split())


# What a page needs before it runs.
BEFORE = {
    "docs/hub-kernels.md": for_the_kernel_hub,
    "docs/other-models.md": run_fused_on_cpu,
    "docs/plans.md": run_fused_on_cpu,
    "docs/upstream.md": for_the_page_on_diffusers,
}
# What a page shows beyond its own assertions.
CHECKS = {
    "README.md": of_the_readme,
    "docs/hub-kernels.md": of_the_page_on_the_kernel_hub,
    "docs/other-models.md": of_the_page_on_other_models,
    "docs/plans.md": of_the_page_on_plans,
    "docs/upstream.md": of_the_page_on_diffusers,
    "docs/writing-a-rule.md": of_the_page_on_rules,
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_of_a_page_runs(page, monkeypatch, tmp_path, capsys, library):
    asked = substitute(monkeypatch)
    monkeypatch.chdir(tmp_path)
    if page in BEFORE:
        BEFORE[page](monkeypatch)
    module = tmp_path / "page.py"  # a file, because Triton reads a kernel's source
    module.write_text(python_of(page), encoding="utf-8")
    names = runpy.run_path(str(module))
    if page in CHECKS:
        CHECKS[page](names, asked, capsys.readouterr().out)


def test_what_is_not_run_is_code_all_the_same():
    for block in BLOCKS:
        if block.why_not is not None:
            {"python": ast.parse, "bash": shlex.split}[block.language](block.code)


def test_no_fence_is_overlooked():
    assert {block.language for block in BLOCKS if not block.why_not} <= LANGUAGES
    fences = sum(len(re.findall(r"^ *```", text, re.MULTILINE)) for text in PAGES.values())
    assert fences == 2 * len(BLOCKS)


# ---- commands

# Subcommands that check all that they are given before they work.
QUICK = {"bench", "kernels", "demo", "info", "sources"}
# Options whose values a reader has: files, and what is written in capitals. And one that writes into the
# checkout, where it would accept code that nobody has read.
ONLY_PARSED = {"--weights", "--against", "--comfyui", "--accept"}


def _sdfastgn(monkeypatch, *arguments):
    """Run where that is cheap; else the options are parsed. See ``quick`` for what stands for the work."""
    name, *options = arguments
    is_complete = not any(word in ONLY_PARSED or word.isupper() for word in options)
    if name in QUICK and is_complete:
        result = invoke(*arguments)
        assert result.exit_code == 0, result.output
        return
    group = typer.main.get_command(app)
    subcommand = group.get_command(click.Context(group), name)
    assert subcommand is not None, name
    if options:  # a name alone may lack what the command needs
        subcommand.make_context(name, options)


def _make(monkeypatch, *arguments):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{name} \??:?=" if is_variable else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), word


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _pip(monkeypatch, action, *arguments):
    """Requirements can be read, and extras of this package exist."""
    assert action in ("install", "download", "uninstall")
    for word in arguments:
        if word.startswith("-"):
            continue
        requirement = Requirement(re.sub(r"^\.", "sdfastgn", word))
        if requirement.name == "sdfastgn":
            assert requirement.extras <= set(project()["optional-dependencies"])


class _ParsedError(Exception):
    """Raised instead of the work of a script, after its options were parsed."""


def _parse_only(monkeypatch, main, arguments):
    """Parse ``arguments`` as the script's function ``main`` does, with argparse, and return."""

    def parse(parser, words, parse=argparse.ArgumentParser.parse_args):
        parse(parser, words)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(_ParsedError):
        main(arguments)


def _python(monkeypatch, first, *arguments):
    """A script or a module that exists; those of the command line have their options checked too."""
    if first == "-m" and arguments[0] == "sdfastgn" and arguments[1:]:
        _sdfastgn(monkeypatch, *arguments[1:])
    elif first == "-m" and arguments[0].startswith("scripts."):
        module = importlib.import_module(arguments[0])
        text = Path(module.__file__).read_text(encoding="utf-8")
        function = re.search(r"(?:main\(__doc__, |typer\.run\()(\w+)\)", text)
        if function:
            click_command(getattr(module, function[1])).make_context(arguments[0], [*arguments[1:]])
        else:
            _parse_only(monkeypatch, module.main, arguments[1:])
    elif first == "-m":
        assert importlib.util.find_spec(arguments[0]) is not None
        assert all((ROOT / word).exists() for word in arguments if word.endswith(".py"))
    elif "sdfastgn.cli import main" in (text := (ROOT / first).read_text(encoding="utf-8")):
        assert exit_code(monkeypatch, Path(first).name, *arguments) == 0
    else:
        assert all(f'"{option}"' in text for option in arguments if option.startswith("--"))


def _launcher(parser, words, monkeypatch):
    """A launcher's own options, and what it launches."""
    found = parser.parse_args(words)
    module = ["-m"] if found.module else []
    _python(monkeypatch, *module, found.training_script, *found.training_script_args)


def _accelerate(monkeypatch, launch, *words):
    assert launch == "launch"
    _launcher(launch_command_parser(), list(words), monkeypatch)


def _torchrun(monkeypatch, *words):
    _launcher(torch.distributed.run.get_args_parser(), list(words), monkeypatch)


def _git(monkeypatch, clone, *address):
    """A clone of the address that tests/test_release.py compares."""
    assert clone == "clone"
    assert address == (project()["urls"]["Repository"],)


def _uvicorn(monkeypatch, *words):
    """The function that makes the app is in the example."""
    _maker(words, words[-1])


def _serve(monkeypatch, action, *words):
    """Ray Serve: the function that makes the app, and the settings that it takes."""
    assert action == "run"
    [name] = [word for word in words if ":" in word]
    text = _maker(words, name)
    assert all(f"    {word.partition('=')[0]}: " in text for word in words if "=" in word)


def _maker(words, name):
    """The text of the example that has the function ``file:function``."""
    [folder] = [after for word, after in itertools.pairwise(words) if word == "--app-dir"]
    file, _, function = name.partition(":")
    text = (ROOT / folder / f"{file}.py").read_text(encoding="utf-8")
    assert f"def {function}(" in text
    return text


PROGRAMS = {
    "accelerate": _accelerate,
    "cd": lambda *words: None,  # into what was cloned
    "curl": lambda *words: None,  # of the example server, which has tests of its own
    "git": _git,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "sdfastgn": _sdfastgn,
    "serve": _serve,
    "torchrun": _torchrun,
    "uvicorn": _uvicorn,
}


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Commands check their options and then return, in a folder with the checkout's folder of results."""
    for name in ("run_bench", "run_kernels"):
        monkeypatch.setattr(session, name, mock.Mock(return_value=0))
    monkeypatch.setattr(digits, "run_demo", mock.Mock(return_value=0))
    (tmp_path / "benchmarks" / "renewal").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.drawn(7)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_right(command, monkeypatch, quick):
    words = list(itertools.dropwhile(re.compile(r"\w+=").match, COMMANDS[command]))
    assert words[0] in PROGRAMS, "add a check of this program here, or mark the block as not run"
    PROGRAMS[words[0]](monkeypatch, *words[1:])


# ---- text
@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"`[^`]*`", "", PAGES[page])
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_prose_wraps_at_100(page):
    text = TABLE.sub("", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL))
    assert [line for line in text.splitlines() if len(line) > 100 and not line.startswith("|")] == []


def test_both_front_pages_begin_with_the_same_five_lines():
    first = [
        next(block for block in BLOCKS if (block.page, block.language) == (page, "python"))
        for page in ("README.md", "docs/index.md")
    ]
    assert first[0].code == first[1].code
    assert len([line for line in first[0].code.splitlines() if line.strip()]) == 5
    assert all("images/times.png" in PAGES[block.page] for block in first)


def words(page):
    """The number of words of a page without its code, tables and front matter."""
    text = re.sub(r"\A---\n.*?\n---\n|^( *)```.*?^\1```$", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    lines = TABLE.sub("", text).splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def test_the_readme_is_read_in_half_a_minute():
    assert words("README.md") <= 600


def test_the_changelog_is_one_page():
    assert words("CHANGELOG.md") <= MOST_WORDS


def test_the_pages_are_on_three_shelves():
    assert list(SHELVES) == ["Use", "Contribute", "Evidence"]
    assert len(SHELVES["Use"]) <= MOST_PAGES


@pytest.mark.parametrize("page", SHELVES["Use"])
def test_a_page_for_use_is_read_in_four_minutes(page):
    assert words(page) <= MOST_WORDS


def test_the_search_shows_use_before_contribute_before_evidence():
    boosts = {
        shelf: {
            float(found[1]) if (found := re.match(r"---\nsearch: \{ boost: (.*) \}\n---\n", text)) else 1.0
            for text in (PAGES[page] for page in pages if not page.endswith("README.md"))
        }
        for shelf, pages in SHELVES.items()
    }
    assert boosts["Use"] == {1.0}
    assert max(boosts["Contribute"]) < 1
    assert min(boosts["Contribute"]) > max(boosts["Evidence"])
    for folder in ("adr", "measurements"):  # a file has the boost of all pages of the folder
        text = (ROOT / "docs" / folder / ".meta.yml").read_text("utf-8")
        assert yaml.safe_load(text)["search"]["boost"] < min(boosts["Evidence"])


def test_every_fusion_is_in_the_table():
    table = PAGES["docs/fusions.md"].partition("## Fusions")[2].partition("\n## ")[0]
    cells = (line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == {
        fusion.name for fusion in FUSIONS
    }


def test_the_api_page_has_every_public_name():
    names = re.findall(r"^::: sdfastgn\.(\w+)$", PAGES["docs/api.md"], re.MULTILINE)
    assert sorted(names) == sorted({*sdfastgn.__all__} - {"__version__"})


def test_switches_of_diffusers_exist():
    """Pages and docstrings for users name methods by which diffusers' classes are set up."""
    users = [text for page, text in PAGES.items() if re.match(r"README|docs/(?!stable-fast)[\w-]+\.md", page)]
    users += [str(getattr(sdfastgn, name).__doc__) for name in sdfastgn.__all__]
    named = set(re.findall(r"\b(?:enable|disable|fuse|load|set|unload)_\w+(?=\(\))", "\n".join(users)))
    named |= set(re.findall(r"`((?:enable|disable|fuse|unload)_\w+)`", "\n".join(users)))
    classes = (diffusers.StableDiffusionXLPipeline, diffusers.AutoencoderKL, diffusers.UNet2DConditionModel)
    assert {"enable_tiling", "enable_model_cpu_offload", "fuse_lora"} <= named
    assert {name for name in named if not any(hasattr(cls, name) for cls in classes)} == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_what_needs_a_gpu_says_so():
    """docs/getting-started.md names these."""
    pipe = build_pipeline("tiny", dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="not on an NVIDIA GPU"):
        sdfastgn.optimize(pipe, precision="fp8")
    with pytest.raises(RuntimeError, match="requires accelerator"):
        pipe.enable_model_cpu_offload()
    assert invoke("warm-up", "tiny").exit_code == 2


@pytest.mark.parametrize("folder", ["docs/adr", "docs/measurements"])
def test_an_index_names_every_note(folder):
    linked = re.findall(r"\]\(([\w-]+\.md)\)", PAGES[f"{folder}/README.md"])
    assert sorted(linked) == sorted(
        path.name for path in (ROOT / folder).glob("*.md") if path.name != "README.md"
    )


def test_the_overview_links_every_page_of_the_navigation():
    navigation = re.findall(
        r"^ +- .*: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    assert navigation[0] == "index.md"
    linked = re.findall(r"\]\(([\w/-]+\.md)\)", PAGES["docs/index.md"])
    assert sorted(linked) == sorted(navigation[1:])
