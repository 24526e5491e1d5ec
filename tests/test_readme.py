"""The pages: their code runs, their commands parse, their links lead somewhere, their prose wraps at 100."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import diffusers
import pytest
import torch
import typer

from sdfastgn.bench.models.pipelines import build_pipeline
from sdfastgn.cli_commands import app
from sdfastgn.patches.registry import FUSIONS

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
}
README = PAGES["README.md"]
COMMANDS = list(
    dict.fromkeys(
        line
        for page in PAGES.values()
        for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
        if line
    )
)


def run_python_blocks(page: str, count: int) -> dict:
    """Runs a page's blocks in order, and returns the names that they leave."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    assert len(blocks) == count
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


def test_the_readme_runs(monkeypatch, capsys):
    pipe = build_pipeline("tiny_xl", dtype=torch.float32, device="cpu")
    monkeypatch.setattr(pipe, "to", lambda device: pipe)  # what stands there is a GPU's
    asked = []
    monkeypatch.setattr(
        diffusers.DiffusionPipeline, "from_pretrained", lambda *args, **kwargs: asked.append(args[-1]) or pipe
    )
    pipe.default_sample_size = 8
    names = run_python_blocks("README.md", 2)
    assert asked == ["stabilityai/stable-diffusion-xl-base-1.0"]
    assert names["image"].size == (64, 64)
    assert "parts fused, 0 skipped" in capsys.readouterr().out


def test_the_page_on_ops_runs():
    names = run_python_blocks("docs/ops.md", 2)
    norm, y = names["norm"], names["y"]
    expected = torch.nn.functional.group_norm(names["x"].contiguous(), 32, norm.weight, norm.bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(names["tokens"].movedim(-1, 1).reshape(y.shape), expected)


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
    text = re.sub(r"```.*?```|<!-- table:(.*?) -->.*?<!-- /table:\1 -->", "", PAGES[page], flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 100 and not line.startswith("|")] == []


@pytest.mark.parametrize(
    "command", [c[c.index("sdfastgn") :] for c in COMMANDS if re.match(r"sdfastgn|.* -m sdfastgn ", c)]
)
def test_every_sdfastgn_command_parses(command):
    group = typer.main.get_command(app)
    _, name, *arguments = shlex.split(command, comments=True)
    subcommand = group.get_command(click.Context(group), name)
    assert subcommand is not None, name
    subcommand.make_context(name, arguments)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_every_make_target_exists(command):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{shlex.split(command, comments=True)[1]}:", makefile, re.MULTILINE)


def test_the_first_code_block_is_eight_lines():
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line.strip()]) <= 8


def test_every_fusion_is_in_the_table():
    table = PAGES["docs/fusions.md"].partition("## Fusions")[2].partition("\n## ")[0]
    cells = (line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == {
        fusion.name for fusion in FUSIONS
    }
