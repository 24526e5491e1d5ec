"""What only a process of its own can show: entry points, imports, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT, invoke, process

SCRIPT = Path(sys.executable).with_name("sdfastgn")
GENERATE = ("generate", "--model", "scripts/digits", "--prompts", "README.md", "--out", "images")
# Modules that take seconds to import, and that info and inspect do without.
HEAVY = ("accelerate", "matplotlib", "peft", "scipy", "sklearn", "torch._dynamo", "transformers")
ALL = ("torch", "triton", "numpy", "diffusers", *HEAVY)


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


@pytest.mark.parametrize(
    ("arguments", "status", "heavy"),
    [
        pytest.param(["bench", "--help"], 0, ALL, id="help"),
        pytest.param(["info"], 0, ("diffusers", *HEAVY), id="info"),
        pytest.param(["inspect", "tiny"], 0, HEAVY, id="inspect"),
        pytest.param(["warm-up", "tiny", "--device", "cpu"], 2, ("sdfastgn.bench",), id="warm-up"),
        *(
            pytest.param([*GENERATE, *wrong], 2, (*ALL, "sdfastgn.bench"), id=f"generate {wrong[0]}")
            for wrong in (
                ("--batch-size", "0"),
                ("--device", "tpu"),
                ("--dtype", "fp8"),
                ("--model", "tests"),
                ("--out", "/no/such"),
                ("--prompts", "/no/such"),
                ("--steps", "0"),
                ("--width", "100"),
            )
        ),
    ],
)
def test_what_a_command_does_not_import(arguments: list[str], status: int, heavy: tuple[str, ...]) -> None:
    """Help and a bad option of ``generate`` are there at once."""
    code = (
        f"import sys\nsys.argv = ['sdfastgn', *{arguments}]\nfrom sdfastgn.cli import main\n"
        f"try:\n    main()\nexcept SystemExit as end:\n    assert (end.code or 0) == {status}\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = process(sys.executable, "-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_inspect_reports_the_same_with_and_without_all_imports(tmp_path: Path) -> None:
    path = tmp_path / "light.json"
    done = process(sys.executable, "-m", "sdfastgn", "inspect", "tiny", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert invoke("inspect", "tiny", "--json", str(tmp_path / "full.json")).exit_code == 0
    assert path.read_text() == (tmp_path / "full.json").read_text()


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


def test_an_interrupt_while_it_measures_is_one_line(tmp_path: Path) -> None:
    chosen = ("--device", "cpu", "--repeats", "1000000", "--variants", "eager")
    command = ("scripts/time_vae.py", "--model", "tiny", "--size", "64", *chosen)
    code, error = interrupted(*command, waits_for="no GPU: ")
    assert (code, error[-1]) == (130, "time_vae.py: interrupted")
    assert not any("Traceback" in line for line in error)


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
