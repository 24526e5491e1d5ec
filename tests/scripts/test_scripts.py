"""The scripts: what each times, its help, and wrong input."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from unittest import mock

import pytest

from sdfastgn.bench.variants import VARIANTS
from sdfastgn.cli import session
from tests.command_line import exit_code, refusal

# What each times where its user says nothing: model, parts, size, batch, dtype and variants.
EVERY = [name for name, variant in VARIANTS.items() if variant.is_in_all]
TIMED = {
    "time_sd15.py": ("sd15", "pipeline", 512, 1, "fp32", EVERY),
    "time_sdxl.py": ("sdxl", "pipeline", 1024, 1, "fp32", EVERY),
    "time_vae.py": ("sd15", "vae", 512, 1, "fp32", EVERY),
    "time_training.py": ("sdxl", "train", 512, 1, "bf16", EVERY),
    "compare_stable_fast.py": (
        "sd15",
        "unet, vae, pipeline",
        512,
        1,
        "fp32",
        ["eager", "sdfastgn", "compile", "stable_fast"],
    ),
}
# What runs the command line, and how its help calls it.
SCRIPTS = {
    **{name: f"scripts/{name}" for name in TIMED},
    "publish/serving_load.py": "scripts.publish.serving_load",
    "publish/warm_up.py": "scripts.publish.warm_up",
}


@pytest.mark.parametrize(("script", "expected"), TIMED.items(), ids=TIMED)
def test_what_a_script_times(
    script: str, expected: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = mock.Mock(return_value=0)
    monkeypatch.setattr(session, "run_bench", ran)
    path = tmp_path / "out.json"
    assert exit_code(monkeypatch, script, "--device", "cpu", "--json", str(path)) == 0
    configs, variants = ran.call_args.args
    parts = ", ".join(config.part for config in configs)
    config = configs[-1]
    found = (config.model, parts, config.size, config.batch, config.dtype)
    assert (*found, [variant.name for variant in variants]) == expected
    assert ran.call_args.kwargs == {"json": path, "plot": None, "html": None}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which wrong input is given."""
    here = tmp_path_factory.mktemp("wrong")
    for name in ("results", "mine"):
        (here / name).mkdir()
    (here / "mine" / "file").touch()
    for name, text in {
        "page.md": "before\n<!-- table:results -->\nold\n<!-- /table:results -->\nafter\n",
        "other.md": "<!-- table:other --><!-- /table:other -->",
        "open.md": "<!-- table:results -->",
        "cut-off.json": "{",
        "no-result.json": '{"kind": "preset"}',
    }.items():
        (here / name).write_text(text)
    return here


# Script and arguments -> the last line of standard error. A star stands for any text, also at the end.
WRONG = {
    **{f"{script} --device tpu": f"{Path(script).name}: --device: cannot use 'tpu'" for script in SCRIPTS},
    "publish/warm_up.py --model tiny --device cpu --new-size 0": (
        "warm_up.py: --new-size: must be a positive multiple of 8"
    ),
    "publish/serving_replicas.py --json out.json --device cpu --replicas 0": (
        "serving_replicas.py: --replicas: must be a positive whole number, got 0"
    ),
    "build_hub_kernels.py --output mine": "*--output: 'mine' is not empty and holds no earlier build",
    "build_compiled.py --output mine": "*--output: 'mine' is not empty and holds no earlier build",
    "build_compiled.py --output out --generation sm_75": "*--generation: invalid choice: 'sm_75'*",
    "build_compiled.py --output out --model sd9": "*--model: invalid choice: 'sd9'*",
    "build_compiled.py --output out --processes 0": "*--processes must be at least 1, got 0",
    "build_hub_kernels.py --output out --repo-id us": "*--repo-id must be owner/name, got 'us'",
    "publish/pages.py --write page.md --results no": "pages: --results: there is no folder 'no' here",
    "publish/pages.py --write none.md --results results": "pages: none.md: *No such file",
    "publish/pages.py --write other.md --results results": "pages: other.md: no table is called other;",
    "publish/pages.py --write open.md --results results": "pages: open.md: the slots opened*those closed",
}


@pytest.mark.parametrize(("command", "message"), WRONG.items(), ids=WRONG)
def test_wrong_input_is_told_and_changes_no_file(
    command: str,
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = refusal(monkeypatch, capsys, here, *command.split())
    assert fnmatch.fnmatchcase(shown.splitlines()[-1], f"{message}*"), shown
    assert shown.count("\n") == 1 or shown.startswith("usage: ")  # argparse's own


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_is_the_scripts_own(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, script, "--help") == 0
    assert f"{SCRIPTS[script]} " in " ".join(capsys.readouterr().out.split())
