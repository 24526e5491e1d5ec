"""The command line and the scripts in processes of their own: entry points, imports, Ctrl-C, lines while it runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sdfastgn.cli_commands import app

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(sys.executable).with_name("sdfastgn")


def process(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


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


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['sdfastgn', '--help']\nfrom sdfastgn.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'diffusers', 'triton', 'numpy') if name in sys.modules])"
    )
    start = time.perf_counter()
    done = process(sys.executable, "-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert time.perf_counter() - start < 10  # about a fifth of a second; loaded machines take longer


# What neither needs of diffusers' own imports, and of ours. ``info`` does without diffusers itself.
HEAVY = ("accelerate", "matplotlib", "peft", "scipy", "sklearn", "torch._dynamo", "transformers")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        pytest.param(["info"], ("diffusers", *HEAVY), id="info"),
        pytest.param(["inspect", "tiny"], HEAVY, id="inspect"),
        pytest.param(["bench", "--help"], ("torch", "diffusers", *HEAVY), id="bench-help"),
    ],
)
def test_what_a_command_does_not_import(arguments: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        f"import sys\nsys.argv = ['sdfastgn', *{arguments}]\nfrom sdfastgn.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = process(sys.executable, "-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_inspect_reports_the_same_with_and_without_all_imports(tmp_path: Path) -> None:
    path = tmp_path / "light.json"
    done = process(sys.executable, "-m", "sdfastgn", "inspect", "tiny", "--json", str(path))
    assert done.returncode == 0, done.stderr
    CliRunner().invoke(app, ["inspect", "tiny", "--json", str(tmp_path / "full.json")])
    assert json.loads(path.read_text()) == json.loads((tmp_path / "full.json").read_text())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "sdfastgn", "bench"], id="command"),
        pytest.param(["scripts/time_vae.py"], id="script"),
        pytest.param(["scripts/train_digits.py", "--width", "8", "--size", "8"], id="digits"),
    ],
)
def test_an_interrupt_is_one_line(command: list[str], tmp_path: Path) -> None:
    arguments = ["--device", "cpu"]
    if "scripts/train_digits.py" not in command:
        arguments += ["--model", "tiny", "--repeats", "100000", "--variants", "channels_last,eager"]
    arguments += ["--json", str(tmp_path / "out.json")]
    running = subprocess.Popen(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    # Wherever it is: while torch is imported or while it measures.
    time.sleep(1.5)
    running.send_signal(signal.SIGINT)
    error = running.communicate(timeout=120)[1]
    assert running.returncode == 130
    program = Path(command[0]).name if command[0].endswith(".py") else "sdfastgn"
    assert error.splitlines()[-1] == f"{program}: interrupted"
    assert "Traceback" not in error


def test_rows_come_as_plain_lines_while_others_are_measured(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sdfastgn",
        "bench",
        "--device",
        "cpu",
        "--variants",
        "eager,channels_last",
    ]
    running = subprocess.Popen(
        [*command, "--repeats", "3"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert running.stderr is not None
    first = running.stderr.readline()
    assert running.poll() is None
    assert first.startswith(b"unet: eager: ")
    out, rest = running.communicate(timeout=120)
    assert rest.startswith(b"unet: channels_last: ")
    assert not any(byte < 32 and byte != 10 for byte in first + rest + out)
    assert b"channels_last" in out


def test_without_typer_it_says_what_to_install() -> None:
    code = "import sys\nsys.modules['typer'] = None\nfrom sdfastgn.cli import main\nmain()"
    done = process(sys.executable, "-c", code)
    assert done.returncode == 1
    assert done.stderr.strip() == "sdfastgn: the command line needs typer: pip install 'sdfastgn[bench]'"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["bench", "--model", "sd3"], ["--model", "'sd3'", "sdxl"], id="model"),
        pytest.param(["bench", "--batch", "two"], ["--batch", "two"], id="not-a-number"),
        pytest.param(["bench", "--colour"], ["--colour"], id="unknown-option"),
        pytest.param(["bench", "--seed", str(2**64)], ["--seed", str(2**64), "64 bits"], id="seed"),
        pytest.param(
            ["kernels", "--seed", str(-(2**64))], ["--seed", str(-(2**64)), "64 bits"], id="negative-seed"
        ),
        pytest.param(["paint"], ["paint"], id="unknown-command"),
    ],
)
def test_bad_input_is_one_line_in_a_real_process(arguments: list[str], words: list[str]) -> None:
    done = process(sys.executable, "-m", "sdfastgn", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words)
