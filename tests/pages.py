"""The code of the pages: its blocks, and small substitutes for what a reader has and a test has not.

A fence holds ``python`` (run in the page's order, in one module), ``bash`` (each command is checked)
or ``text`` (what is printed). ``<!-- not run: why -->`` above a fence leaves it out, with the reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from peft import LoraConfig

from sdfastgn.models.pipelines import build_pipeline
from tests.command_line import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
}
LANGUAGES = {"python", "bash", "text"}


class Block(NamedTuple):
    """A fence of a page. ``why_not``: the reason not to run it, or None. ``line``: of its first line."""

    page: str
    line: int
    language: str
    code: str
    why_not: str | None

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> Iterator[Block]:
    pattern = r"(?:<!-- not run: (.*?) -->\s*)?^( *)```(\w*)\n(.*?)^\2```$"
    for found in re.finditer(pattern, PAGES[page], re.DOTALL | re.MULTILINE):
        why_not, _, language, code = found.groups()
        line = PAGES[page].count("\n", 0, found.start(4)) + 1
        yield Block(page, line, language, code, why_not)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def python_of(page: str) -> str:
    """The page's Python as one module, each statement on the line that it has in the page."""
    lines = [""] * PAGES[page].count("\n")
    for block in BLOCKS:
        if (block.page, block.language, block.why_not) == (page, "python", None):
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    text = "\n".join(lines)
    if not torch.cuda.is_available():
        text = text.replace('"cuda"', '"cpu"')
    return text


def commands() -> dict[str, list[str]]:
    """Every command of the pages, in a block or in the text, with its words."""
    found = [line for block in BLOCKS if (block.language, block.why_not) == ("bash", None)
             for line in block.code.replace("\\\n", " ").splitlines()]  # fmt: skip
    for text in PAGES.values():
        prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
        spans = re.findall(r"`((?:sdfastgn|make|pip|python) [^`]*)`", prose)
        found += [re.sub(r"\s+", " ", span) for span in spans if "..." not in span]
    words = (shlex.split(line, comments=True) for line in found)
    return {shlex.join(each): each for each in words if each}


def substitute(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models with random weights and few layers stand for those of the Hub.

    Returns the names of the pipelines that were asked for, which grow as the page runs.
    """
    asked: list[str] = []
    load = diffusers.DiffusionPipeline.from_pretrained.__func__

    def build(source: str) -> Any:
        return build_pipeline("tiny_xl" if "xl" in source else "tiny", dtype=torch.float32, device="cpu")

    def pipeline(cls: Any, source: str, **options: Any) -> Any:
        if Path(source).exists():  # what the page has saved
            return load(cls, source, **options)
        asked.append(source)
        pipe = build(source)
        pipe.default_sample_size = 8
        pipe.register_modules(**{name: part for name, part in options.items() if name in pipe.components})
        return pipe

    def model(cls: Any, source: str, **_: Any) -> Any:
        return next(part for part in build(source).components.values() if type(part) is cls)

    def lora(pipe: Any, source: str, adapter_name: str = "default", **_: Any) -> None:
        config = LoraConfig(r=4, target_modules=["to_q", "conv1"], init_lora_weights=False)
        pipe.unet.add_adapter(config, adapter_name=adapter_name)

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(pipeline))
    monkeypatch.setattr(diffusers.ModelMixin, "from_pretrained", classmethod(model))
    for cls in (diffusers.StableDiffusionPipeline, diffusers.StableDiffusionXLPipeline):
        monkeypatch.setattr(cls, "load_lora_weights", lora)
    return asked
