"""Pipelines and models of diffusers: the same output, an exact restore, and docs/coverage.md as it ran."""

from pathlib import Path

import diffusers
import pytest
import torch

from tests.coverage import parts
from tests.coverage.page import SECTIONS, line
from tests.coverage.run import run

pytestmark = pytest.mark.fused_on_cpu

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coverage.md").read_text(encoding="utf-8")
each_row = pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{s.title}-{row.name}".replace(" ", "_")) for s in SECTIONS for row in s]
)


def result_of(row):
    try:
        return run(row)
    except (AttributeError, TypeError) as error:
        lacks = "module diffusers has no attribute", "unexpected keyword argument"
        if f"diffusers {diffusers.__version__}." in PAGE or not any(words in str(error) for words in lacks):
            raise
        pytest.skip(str(error))


@each_row
def test_same_output_and_exact_restore(row):
    result = result_of(row)
    assert result.error < 1e-4
    assert result.restored
    if f"diffusers {diffusers.__version__}." in PAGE:
        assert line(result) in PAGE, "run: python -m tests.coverage.page --write docs/coverage.md"


def test_the_page_has_these_rows():
    if f"diffusers {diffusers.__version__}." not in PAGE:
        pytest.skip("the page is about another diffusers")
    lines = iter(PAGE.splitlines())
    for section in SECTIONS:
        assert f"## {section.title}" in lines
        assert any("---" in line for line in lines)
        assert [next(lines).split(" | ")[0] for _ in section] == [f"| {row.name}" for row in section]


@pytest.mark.gpu
@each_row
def test_same_output_on_the_gpu_in_fp16(row, monkeypatch):
    monkeypatch.setitem(parts.WHERE, "device", "cuda")
    monkeypatch.setitem(parts.WHERE, "dtype", torch.float16)
    result = result_of(row)
    assert result.error < 3e-2
    assert result.restored
