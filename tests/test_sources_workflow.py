"""The nightly comparison with upstream's newest code: it opens one issue, and only if something changed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from sdfastgn.patches.swap.tested_sources import newest_release
from tests.command_line import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "sources.yml").read_text(encoding="utf-8"))
STEPS = {step.get("name"): step for step in WORKFLOW["jobs"]["compare"]["steps"]}


def programs(folder: Path, **scripts: str) -> None:
    """Put a bash script at each path."""
    for name, script in scripts.items():
        path = folder / (".venv/bin" if name in ("sdfastgn", "python") else "bin") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)


def run(folder: Path, step: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", **variables}
    command = ["bash", "-e", "-c", STEPS[step]["run"]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("code", "open_issue", "expected"),
    [
        (0, "", []),
        (1, "", ["issue create --title Untested --body-file body.md"]),
        (1, "12", ["issue edit 12 --body-file body.md"]),
        (2, "", []),  # a wrong command is no news of upstream
    ],
)
def test_an_issue(tmp_path: Path, code: int, open_issue: str, expected: list[str]) -> None:
    found = '[ "$2" = list ] && echo "$OPEN" || echo "$@" >> calls'
    programs(tmp_path, gh=found, sdfastgn=f'echo "got $@"; echo "an error" >&2; exit {code}')
    done = run(tmp_path, "compare", TITLE="Untested", OPTIONS="--against known", OPEN=open_issue)
    assert done.returncode == (code if code > 1 else 0), done.stderr
    assert "got sources --against known\nan error\n" in done.stdout
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == expected
    if expected:
        body = (tmp_path / "body.md").read_text()
        assert body.splitlines()[1:4] == ["```text", "got sources --against known", "an error"]


@pytest.mark.parametrize(
    ("step", "package", "options"),
    [
        ("diffusers", "diffusers", "--against known/diffusers-{}-py3-none-any.whl"),
        ("ComfyUI", "comfy", "--comfyui newest --against known"),
    ],
)
def test_what_is_compared(tmp_path: Path, step: str, package: str, options: str) -> None:
    release = newest_release(package)
    python = f"""echo "$@" >> calls
    case "$*" in
    -c*) echo {release} ;;
    *download*) name="${{@: -1}}"; mkdir known; touch "known/diffusers-${{name#*==}}-py3-none-any.whl" ;;
    esac"""
    programs(tmp_path, python=python, git='echo "git $@" >> calls', make='echo "make $@" >> calls')
    done = run(tmp_path, step, GITHUB_ENV=str(tmp_path / "env"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "env").read_text().strip() == f"OPTIONS={options.format(release)}"
    calls = (tmp_path / "calls").read_text()
    assert re.search(rf"diffusers=={release}$|--branch v{release} https://\S+ known$", calls, re.MULTILINE)
    assert re.search(r"^-m pip install diffusers @ git|^git clone --depth 1 \S+ newest$", calls, re.MULTILINE)
