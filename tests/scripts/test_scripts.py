"""The scripts: what each times, its help, and bad input."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from sdfastgn.bench.variants import VARIANTS
from sdfastgn.cli import session
from tests.command_line import exit_code

# What each times where its user says nothing: model, parts, size, batch, dtype and variants.
EVERY = list(VARIANTS)
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
    "publish/host.py": "scripts.publish.host",
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_input_is_one_line(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, script, "--device", "tpu") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{Path(script).name}: --device: cannot use 'tpu'")
    assert error.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_is_the_scripts_own(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, script, "--help") == 0
    assert f"{SCRIPTS[script]} " in " ".join(capsys.readouterr().out.split())
