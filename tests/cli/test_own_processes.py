"""What only a process of its own can show: entry points, imports, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT, invoke
from tests.processes import process

SCRIPT = Path(sys.executable).with_name("sdfastgn")
# Modules that take seconds to import, and that info and inspect do without.
HEAVY = ("accelerate", "matplotlib", "peft", "scipy", "sklearn", "torch._dynamo", "transformers")
ALL = ("torch", "triton", "numpy", "diffusers", *HEAVY)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "command",
    [pytest.param([str(SCRIPT)], id="script"), pytest.param([sys.executable, "-m", "sdfastgn"], id="module")],
)
def test_help_lists_the_commands(command: list[str]) -> None:
    if not Path(command[0]).exists():
        pytest.skip("sdfastgn is not installed as a script")
    done = process(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("bench", "kernels", "inspect", "info", "demo"))


BENCH = "sdfastgn.bench"
GENERATE = "generate --model scripts/digits --prompts README.md --out images"
WRONG = ("batch-size 0", "device tpu", "dtype fp8", "model tests", "out /no/such/images")
WRONG += ("prompts /no/such", "steps 0", "width 100")
WRONG_WARM_UP = ("tiny --device cpu", "tiny --batch 0", "tiny --dtype fp8", "sd3", "tiny --export /no/such/a")
# Commands of one process -> exit code, and what no command so far has imported: help and a bad option of
# generate are there at once.
LIGHT: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "light": {
        **{f"{GENERATE} --{option}": (2, (*ALL, BENCH)) for option in WRONG},
        **{f"warm-up {wrong}": (2, (*ALL, BENCH)) for wrong in WRONG_WARM_UP},
        "bench --help": (0, ALL),
        "info": (0, ("diffusers", *HEAVY)),
        "inspect tiny --json FOLDER/light.json": (0, HEAVY),
    },
    "warm-up": {"warm-up tiny --size 60": (2, (BENCH,))},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT)
def test_what_commands_do_not_import(name: str, tmp_path: Path) -> None:
    code = f"""
import sys
from sdfastgn.cli import main
for command, (status, heavy) in {LIGHT[name]}.items():
    sys.argv = ["sdfastgn", *command.replace("FOLDER", {str(tmp_path)!r}).split()]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == status, command
    found = [name for name in heavy if name in sys.modules]
    assert not found, (command, found)
"""
    done = process(sys.executable, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "light":  # inspect reports the same with all imports
        full = tmp_path / "full.json"
        assert invoke("inspect", "tiny", "--json", str(full)).exit_code == 0
        assert set(json.loads(full.read_text())) == {"unet", "vae"}
        assert (tmp_path / "light.json").read_text() == full.read_text()


def test_a_warning_is_one_line_without_its_file() -> None:
    code = """
import warnings
from sdfastgn import cli

def warn() -> None:
    warnings.warn("first\\n  second (Triggered internally at /pytorch/a.cpp:1.)", FutureWarning)

cli.main("", warn)
"""
    done = process(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (0, "warning: first second\n")


def interrupted(*command: str, waits_for: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code and standard error of a command that is interrupted once it has printed a line."""
    running = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,  # open until the end: reading it waits
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells start background jobs, and so whoever runs these tests in one, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    assert running.stdout.readline().startswith(waits_for)
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=300)
    return running.returncode, error.splitlines()


@pytest.mark.slow
def test_an_interrupt_while_it_measures_is_one_line(tmp_path: Path) -> None:
    chosen = ("--device", "cpu", "--repeats", "1000000", "--variants", "eager")
    command = ("scripts/time_vae.py", "--model", "tiny", "--size", "64", *chosen)
    code, error = interrupted(*command, waits_for="no GPU: ")
    assert (code, error[-1]) == (130, "time_vae.py: interrupted")
    assert not any("Traceback" in line for line in error)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("becomes", ["raise", "raise ImportError('torch is broken')", "pass"])
def test_an_interrupt_while_torch_is_imported_is_one_line(becomes: str, tmp_path: Path) -> None:
    """Whatever the import makes of it."""
    (tmp_path / "torch.py").write_text(
        "import sys\ntry:\n    print('importing', flush=True)\n    sys.stdin.read()\n"
        f"except KeyboardInterrupt:\n    {becomes}\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    code, error = interrupted("-m", "sdfastgn", "info", waits_for="importing", PYTHONPATH=path)
    assert (code, error[-1]) == (130, "sdfastgn: interrupted")
    assert not any("Traceback" in line for line in error)


def test_without_typer_it_says_what_to_install() -> None:
    code = "import sys\nsys.modules['typer'] = None\nfrom sdfastgn.cli import main\nmain()"
    done = process(sys.executable, "-c", code)
    assert done.returncode == 1
    assert done.stderr.strip() == "sdfastgn: the command line needs typer: pip install 'sdfastgn[bench]'"
