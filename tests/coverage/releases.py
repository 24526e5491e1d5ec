"""The release of diffusers that the coverage page is about, and tests beside others."""

import contextlib
from pathlib import Path

import diffusers
import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coverage.md").read_text(encoding="utf-8")
IS_RELEASE_OF_PAGE = f"diffusers {diffusers.__version__}." in PAGE


@contextlib.contextmanager
def skipped_if_missing():
    """Skips a test if another release of diffusers lacks a class, an argument or its default."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        lacks = (
            "module diffusers has no attribute",
            "unexpected keyword argument",
            "required positional argument",
        )
        if IS_RELEASE_OF_PAGE or not any(words in str(error) for words in lacks):
            raise
        pytest.skip(str(error))
