"""The README's code runs and its commands parse."""

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

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line
]


def test_every_python_block_runs_in_order(monkeypatch, capsys):
    pipe = build_pipeline("tiny_xl", dtype=torch.float32, device="cpu")
    monkeypatch.setattr(pipe, "to", lambda device: pipe)  # what stands there is a GPU's
    asked = []
    monkeypatch.setattr(
        diffusers.DiffusionPipeline, "from_pretrained", lambda *args, **kwargs: asked.append(args[-1]) or pipe
    )
    pipe.default_sample_size = 8
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert asked == ["stabilityai/stable-diffusion-xl-base-1.0"]
    assert names["image"].size == (64, 64)
    norm, y = names["norm"], names["y"]
    expected = torch.nn.functional.group_norm(names["x"].contiguous(), 32, norm.weight, norm.bias)
    torch.testing.assert_close(names["tokens"].movedim(-1, 1).reshape(y.shape), expected)
    assert "resnet_block" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("sdfastgn")])
def test_every_sdfastgn_command_parses(command):
    group = typer.main.get_command(app)
    _, name, *arguments = shlex.split(command, comments=True)
    subcommand = group.get_command(click.Context(group), name)
    assert subcommand is not None, name
    subcommand.make_context(name, arguments)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_every_make_target_exists(command):
    makefile = (Path(__file__).resolve().parents[1] / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{shlex.split(command, comments=True)[1]}:", makefile, re.MULTILINE)


def test_the_first_code_block_is_eight_lines():
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line.strip()]) <= 8


def test_every_fusion_is_in_the_table():
    table = README.partition("## What is fused")[2].partition("\n\nConvolution weights")[0]
    cells = (line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == {
        fusion.name for fusion in FUSIONS
    }
