"""``sdfastgn sources``: which upstream methods are known, and what changed in the others."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

import pytest

from sdfastgn.cli.known_sources import KNOWN_RELEASE
from sdfastgn.patches.core.tested_sources import hash_of
from sdfastgn.patches.registry import FUSIONS
from tests.command_line import invoke

METHOD = "geglu: GEGLU.forward"
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
def hashes(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """GEGLU's, to change: ``forward`` is known as another release has it."""
    [geglu] = next(fusion.sources for fusion in FUSIONS if fusion.name == "geglu")
    [method] = ast.parse(OTHER_RELEASE).body[0].body
    monkeypatch.setitem(geglu.hashes, "forward", (hash_of(method),))
    return geglu.hashes


def test_all_are_known():
    result = invoke("sources")
    assert result.exit_code == 0
    assert f"{METHOD}: known" in result.stdout.splitlines()
    assert "unknown (" not in result.stdout


@pytest.mark.usefixtures("hashes")
def test_an_unknown_one_and_how_to_see_what_changed():
    result = invoke("sources")
    assert result.exit_code == 1
    assert f"{METHOD}: unknown (" in result.stdout
    assert f"sdfastgn sources --against diffusers-{KNOWN_RELEASE}-py3-none-any.whl" in result.stdout


@pytest.mark.usefixtures("hashes")
def test_what_changed_since_a_release(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    shown = {invoke("sources", "--against", str(path)).stdout for path in (wheel, tmp_path)}
    [lines] = [each.splitlines() for each in shown]
    changed = [line.strip() for line in lines if line.startswith("    ")]
    assert changed[:2] == ["--- known", "+++ installed"]
    assert "-    return hidden_states + 28201" in changed
    assert any(line.startswith("+") and "self.proj(hidden_states)" in line for line in changed)
    assert "Nobody" not in str(changed)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("forward", "it is not known in that release either"),
        ("backward", "it is gone, or other code has replaced it"),
    ],
)
def test_what_has_no_diff(method, reason, hashes, wheel, monkeypatch):
    monkeypatch.setitem(hashes, method, ("0" * 16,))
    assert f"    {reason}" in invoke("sources", "--against", str(wheel)).stdout.splitlines()
