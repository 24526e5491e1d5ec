"""Runs other programs: one to its end, or several that wait for each other, such as a process group."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def process(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program that ran to its end."""
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def run_together(
    commands: list[list[str]],
    folder: Path,
    *,
    cwd: Path | None = None,
    seconds: float = 240,
    **environment: str,
) -> None:
    """Runs ``commands`` at the same time, and fails if one fails or takes longer than ``seconds``.

    When one fails the others are stopped, because they may wait for it.
    Python processes that are stopped first write where their threads are.
    The failure shows what each process wrote to stderr, which is kept in ``folder``.
    """
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment}
    logs = [folder / f"stderr-{number}.txt" for number in range(len(commands))]
    processes = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("w") as stderr:
                processes.append(
                    subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stderr=stderr)
                )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                break
            time.sleep(0.05)
        ended = [process.poll() for process in processes]
        for process in processes:
            process.send_signal(signal.SIGABRT)  # does nothing to a process that has ended
        for process in processes:
            process.wait(timeout=30)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "\n".join(
        f"--- process {i}: {code}\n{log.read_text()[-6000:]}"
        for i, (code, log) in enumerate(zip(ended, logs, strict=True))
    )
    assert ended == [0] * len(commands), said
