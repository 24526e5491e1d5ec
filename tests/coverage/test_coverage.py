"""Pipelines and models of diffusers: the same output, an exact restore, and docs/coverage.md as it ran."""

import pytest
import torch

from tests.coverage import parts
from tests.coverage.page import SECTIONS, line
from tests.coverage.releases import IS_RELEASE_OF_PAGE, PAGE, skipped_if_missing
from tests.coverage.run import run

pytestmark = pytest.mark.fused_on_cpu

each_row = pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{s.title}-{row.name}".replace(" ", "_")) for s in SECTIONS for row in s]
)


@pytest.mark.slow
@each_row
def test_same_output_and_exact_restore(row):
    with skipped_if_missing():
        result = run(row)
    assert result.error < 1e-4
    assert result.restored
    if IS_RELEASE_OF_PAGE:
        assert line(result) in PAGE, "run: python -m tests.coverage.page --write docs/coverage.md"


def test_the_page_has_these_rows():
    if not IS_RELEASE_OF_PAGE:
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
    with skipped_if_missing():
        result = run(row)
    assert result.error < 3e-2
    assert result.restored
