"""What a tag publishes: a tag that is not the version stops before anything is built."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement

import sdfastgn
from tests.command_line import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture
def jobs() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


@pytest.mark.parametrize(
    ("tag", "code"),
    [(f"v{sdfastgn.__version__}", 0), (sdfastgn.__version__, 1), (f"v{sdfastgn.__version__}1", 1), ("v", 1)],
)
def test_the_tag_must_be_the_version(jobs: dict[str, Any], tag: str, code: int) -> None:
    steps = jobs["build"]["steps"]
    names = [step.get("name", step.get("run")) for step in steps]
    assert names.index("the tag is the version") < names.index("make dist")
    check = steps[names.index("the tag is the version")]["run"]
    done = subprocess.run(
        ["bash", "-e", "-c", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == code


def test_nothing_is_published_without_a_public_address(jobs: dict[str, Any], tmp_path: Path) -> None:
    steps = jobs["build"]["steps"]
    names = [step.get("name", step.get("run")) for step in steps]
    place = names.index("the repository has a public address")
    assert place < names.index("make dist")
    for host, code in (("repository.invalid", 1), ("example.org", 0)):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (tmp_path / "pyproject.toml").write_text(text.replace("repository.invalid", host))
        command = ["bash", "-e", "-c", steps[place]["run"]]
        done = subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True)
        assert done.returncode == code


@pytest.mark.parametrize(
    ("file", "pattern", "count"),
    [
        ("pyproject.toml", r'^(?:Repository|Changelog) = "(.*)"$', 2),
        ("integrations/comfyui/pyproject.toml", r'^(?:Repository|Documentation|Icon) = "(.*)"$', 3),
        ("CITATION.cff", r'^repository-code: "(.*)"$', 1),
        ("README.md", r"^git clone (\S+)", 1),
    ],
)
def test_the_repository_has_one_address(file: str, pattern: str, count: int) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project["urls"]["Repository"]
    found = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == count
    assert all(f"{each}/".startswith(f"{address}/") for each in found)


def test_the_extra_of_the_readme_brings_all_that_loras_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [extras] = re.findall(
        r'^pip install "\.\[(.*)\]"$', (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    brought = [
        Requirement(each).name
        for extra in extras.split(",")
        for each in project["optional-dependencies"][extra]
    ]
    assert {"diffusers", "peft", "triton"} <= set(brought)


def test_only_the_job_that_publishes_gets_a_token(jobs: dict[str, Any]) -> None:
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {"contents": "read"}
    assert "permissions" not in jobs["build"]
    publish = jobs["publish"]
    assert (publish["needs"], publish["environment"]) == ("build", "pypi")
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("run" in step for step in publish["steps"])  # no code of the repository beside the token


def test_make_dist_builds_the_compiled_kernels_too_and_checks_them() -> None:
    done = subprocess.run(["make", "-n", "dist"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r" -m (build|scripts\.build_compiled|twine) (.*)$", done.stdout, re.MULTILINE)
    assert steps == [
        ("build", "--no-isolation --outdir dist ."),
        ("twine", "check --strict dist/*"),
        ("scripts.build_compiled", "--output build/compiled"),
        ("build", "--no-isolation --wheel --outdir dist build/compiled"),
        ("twine", "check --strict dist/*"),
    ]


def test_what_make_dist_has_checked_is_published_without_a_password(jobs: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^dist:.*\n(\t.*\n)*\t.* twine check --strict dist/\*$", makefile, re.MULTILINE)
    upload, (download, publish) = jobs["build"]["steps"][-1], jobs["publish"]["steps"]
    assert upload["with"] == download["with"] == {"name": "dist", "path": "dist"}
    assert publish["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "with" not in publish  # the token is exchanged for the right to publish
