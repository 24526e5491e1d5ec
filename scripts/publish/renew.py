"""Repeats most measurements that the published pages show, at one commit on one GPU.

python -m scripts.publish.renew --out build/renewal

The measurements are the ``STEPS`` of ``scripts.publish.steps``. Other commands make the results in
``benchmarks/by_hand``. With ``--resume``, steps that an earlier call finished at this commit do not run
again, so several short calls do the same as one long call. ``--archive`` also packs the results into one
file. ``--unpack`` extracts such a file into ``benchmarks/renewal`` and ``docs/images``. Afterwards
``python -m scripts.publish.pages`` writes the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.publish.steps import MOST_SECONDS, RESULTS, ROOT, STEPS, SUMMARY, Step, origin
from sdfastgn.bench.documents import FAILED, OK, document, read_json, write_json
from sdfastgn.bench.environment import environment

NOT_STARTED = "not started"
# A step (one measurement) is stopped after its budget of seconds times this number, so that a step that hangs
# does not block the others. It is stopped earlier if the time of the whole call (``--budget``) is up.
PATIENCE = 3


@dataclass
class StepRow:
    """The outcome of one step, which is a measurement in a process of its own.

    Attributes:
        writes: the file that the step makes, relative to the folder of the results.
        status: ``OK``, ``FAILED`` or ``NOT_STARTED``.
        seconds: how long the step ran. For a step that ``--resume`` skips, the time in the earlier call.
        budget: the step's budget in seconds.
        reason: why the step failed or was not started.
    """

    writes: str
    status: str
    seconds: float
    budget: int
    reason: str = ""


def renew(
    steps: Sequence[Step],
    out: Path,
    *,
    tiny: bool = False,
    resume: bool = False,
    budget: float = float("inf"),
) -> list[StepRow]:
    """Runs ``steps`` one after another, and returns a row for each step.

    If a step fails, the following steps still run. After each step, all rows are written to
    ``out / "renewal.json"``.

    Args:
        steps: the measurements.
        out: the folder for the files that the steps make.
        tiny: True for a dry run of tiny models on the CPU.
        resume: if True, steps that an earlier call has finished do not run again.
        budget: number of seconds for all steps. A step is not started if less time is left than the step's
            own budget.
    """
    until = time.monotonic() + budget
    where = environment(torch.device("cpu" if tiny else "cuda"))
    kept = _kept(out, where, tiny) if resume else {}
    rows = {s.writes: kept.get(s.writes) or StepRow(s.writes, NOT_STARTED, 0.0, s.budget) for s in steps}

    def write() -> None:
        write_json(out / SUMMARY, document("renewal", where, {"tiny": tiny}, rows.values()))

    write()
    for step in (step for step in steps if step.writes not in kept):
        left = until - time.monotonic()
        if step.budget > left:
            rows[step.writes].reason = f"{left:.0f} s are left"
        else:
            rows[step.writes] = _run(step, out, tiny, timeout=min(left, PATIENCE * step.budget))
        print(_line(rows[step.writes]), flush=True)
        write()
    return list(rows.values())


def _kept(out: Path, where: dict[str, Any], tiny: bool) -> dict[str, StepRow]:
    """Returns {file: row} for the steps that an earlier call with the folder ``out`` has finished.

    The dict is empty if the earlier call had another commit, another GPU or another value of ``tiny``.
    """
    if not (out / SUMMARY).exists():
        return {}
    content = read_json(out / SUMMARY)
    if origin(content) != origin({"environment": where}) or content["config"]["tiny"] != tiny:
        return {}
    rows = [StepRow(**row) for row in content["rows"]]
    return {row.writes: row for row in rows if row.status == OK and (out / row.writes).exists()}


def _run(step: Step, out: Path, tiny: bool, timeout: float) -> StepRow:
    """Runs one step and returns its row.

    The step writes its file into the folder ``unfinished``. If the step succeeds, the file is moved to its
    final place. The output of the step is written to a file in the folder ``logs``.
    """
    path, unfinished = out / step.writes, out / "unfinished" / step.writes
    log = out / "logs" / f"{step.name}.log"
    for each in (path, unfinished, log):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.unlink(missing_ok=True)
    begun = time.monotonic()
    code = execute(step.arguments(unfinished, tiny=tiny), log, timeout)
    row = StepRow(step.writes, OK, round(time.monotonic() - begun, 1), step.budget)
    if code == 0 and unfinished.exists():
        unfinished.replace(path)
        return row
    why = f"stopped after {timeout:.0f} s" if code is None else f"exit code {code}"
    last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    row.status, row.reason = FAILED, f"{why}: {last}"
    return row


def execute(arguments: Sequence[str], log: Path | None, timeout: float) -> int | None:
    """Runs a program and returns its exit code, or None if it was stopped after ``timeout`` seconds.

    ``arguments``: the program and its arguments. ``log``: the file for the program's output. If it is None,
    the output goes where this process's output goes.
    """
    with contextlib.nullcontext() if log is None else log.open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # this ends the program and its child processes
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def _line(row: StepRow) -> str:
    return f"{row.status:11} {row.seconds:5.0f} of {row.budget:3} s  {row.writes}  {row.reason}".rstrip()


# ---- the results as one file


def pack(out: Path, archive: Path) -> None:
    """Packs the summary, every result and every log of ``out`` into the ``.tar.gz`` file ``archive``."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as packed:
        for path in sorted(out.rglob("*")):
            if path.is_file() and "unfinished" not in path.relative_to(out).parts:
                packed.add(path, path.relative_to(out).as_posix())


def unpack(archive: Path, results: Path, pictures: Path) -> None:
    """Extracts a renewal's JSON files into ``results`` and its pictures into ``pictures``.

    Raises ValueError, before anything is written, if the archive is not a complete renewal or is a dry run.
    """
    with tarfile.open(archive, "r:gz") as packed:
        files = {name: packed.extractfile(name) for name in packed.getnames()}
        content = {name: file.read() for name, file in files.items() if file is not None}
    if SUMMARY not in content:
        raise ValueError(f"--unpack: {str(archive)!r} has no {SUMMARY}")
    summary = json.loads(content[SUMMARY])
    if summary["config"]["tiny"]:
        raise ValueError(f"--unpack: {str(archive)!r} is a dry run of tiny models")
    done = {row["writes"] for row in summary["rows"] if row["status"] == OK}
    left = [step.writes for step in STEPS if step.writes not in done]
    if left:
        raise ValueError(f"--unpack: {str(archive)!r} lacks {', '.join(left)}; go on with --resume")
    for name in (SUMMARY, *(step.writes for step in STEPS)):
        path = (pictures if name.endswith(".png") else results) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[name])


# ---- the command line


def _reason_not_to(options: argparse.Namespace) -> str | None:
    """Returns why a renewal must not run here, in one line; None if it may run."""
    git = environment(torch.device("cpu"))["git"]
    if git["commit"] is None:
        return "no commit can be told: outside of a git checkout, set SDFASTGN_COMMIT to that of the source"
    if options.tiny:
        return None
    if git["dirty"]:
        return "sdfastgn or scripts have changes that are not committed, so no commit would name them"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU, and times taken on a CPU would say nothing; --tiny is a dry run"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code.

    It is 1 if a step failed, 2 if the renewal or the unpacking is refused, else 0.
    """
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.renew", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "renewal", help="folder of the results")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds that this call may take")
    parser.add_argument("--resume", action="store_true", help="skip steps that earlier calls finished")
    parser.add_argument("--tiny", action="store_true", help="dry run: tiny models on the CPU, no useful time")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="also write the results as this .tar.gz")
    parser.add_argument(
        "--unpack", type=Path, metavar="FILE", help="put an archive into benchmarks/renewal and docs/images"
    )
    options = parser.parse_args(arguments)
    if options.unpack is not None:
        try:
            unpack(options.unpack, RESULTS, ROOT / "docs" / "images")
        except (OSError, ValueError, tarfile.TarError) as error:
            print(f"renew: {error}", file=sys.stderr)
            return 2
        return 0
    if (reason := _reason_not_to(options)) is not None:
        print(f"renew: {reason}", file=sys.stderr)
        return 2
    # The folder's path must be absolute, because the steps run in another folder, the checkout's root.
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = renew(STEPS, out, tiny=options.tiny, resume=options.resume, budget=options.budget)
    if options.archive is not None:
        pack(out, options.archive)
    waiting = sum(row.status == NOT_STARTED for row in rows)
    took = sum(row.seconds for row in rows)
    print(f"{took:.0f} of {MOST_SECONDS} s" + (f"; {waiting} steps are left for --resume" if waiting else ""))
    return int(any(row.status == FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
