"""Time networks of video models: stock, with torch.compile, and with sdfastgn.

python -m scripts.publish.compiled_videos --folder benchmarks/by_hand/compiled_videos

torch.compile runs as in the variant ``compile_channels_last`` of ``sdfastgn bench``: on weights in
channels-last, in its default mode. Each network has a process and a file of its own. In the process of a
network, calls of stock, torch.compile and sdfastgn take turns. Compiling a network can take minutes. If the
time limit (``--limit``) ends earlier, the file has only the times of stock and sdfastgn.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import sdfastgn
from scripts.publish.networks import CASES, Case
from scripts.publish.real_sizes import MAX_CALLS, MAX_ERROR, MIN_CALLS, ROUND_SECONDS, WARM_UP, built
from scripts.publish.renew import execute
from scripts.publish.runs import finite
from scripts.publish.tables.compiled_videos import KIND, CompiledRow
from sdfastgn.bench import documents, profiling, timing
from sdfastgn.bench.environment import environment
from sdfastgn.bench.images import relative_error
from sdfastgn.bench.variants import VARIANTS, prepared
from sdfastgn.cli.session import exit_code
from sdfastgn.kernels.common.failures import one_line

# Names of the networks that are timed. Networks that torch.compile compiles quickly come first, because time
# may run out.
NAMES = (
    "Qwen-Image VAE decode, 1024²",
    "Wan 2.1 VAE decode, 17 x 480 x 832",
    "CogVideoX VAE decode, 9 x 480 x 720",
    "HunyuanVideo VAE decode, 17 x 480 x 832",
    "AnimateDiff UNet, 16 x 512²",
    "SVD UNet, 14 x 576 x 1024",
)
# A function that is called with a network's row whenever more of its times are known.
Note = Callable[[CompiledRow], None]


def chosen(names: Sequence[str]) -> list[Case]:
    """Returns the networks of ``NAMES`` that begin with one of ``names``; all if ``names`` is empty."""
    by_name = {case.name: case for case in CASES}
    return [by_name[name] for name in NAMES if not names or name.startswith(tuple(names))]


def measure(case: Case, device: torch.device, note: Note) -> None:
    """Times a network stock, with sdfastgn, and then with torch.compile, whose compiling may take minutes.

    Calls ``note`` with the network's row whenever more of its times are known.
    """
    row = CompiledRow(case.name, str(case.dtype).removeprefix("torch."))
    try:
        _, stock = built(case, device)
        expected = stock()
        model, ours = built(case, device)
        sdfastgn.optimize(model)
        first, found = timing.time_once(ours, device)
        error = relative_error(found, expected)
        stock_ms, ours_ms = in_turns((stock, ours), device)
    except Exception as reason:  # the network failed: its row gets the error's text
        note(replace(row, status=documents.FAILED, reason=one_line(reason)))
        return
    row = replace(
        row,
        stock_ms=stock_ms,
        optimized_ms=ours_ms,
        first_call_s=first,
        error=finite(error),
        status=documents.OK if error < MAX_ERROR else documents.WRONG,
    )
    note(row)
    try:
        row = _compiled(row, case, device, stock, ours, expected)
    except Exception as reason:
        row = replace(row, reason=one_line(reason))
    note(row)
    if device.type == "cuda":
        note(replace(row, floor_ms=_floor_ms(model, ours, device)))


def _compiled(
    row: CompiledRow,
    case: Case,
    device: torch.device,
    stock: Callable[[], Tensor],
    ours: Callable[[], Tensor],
    expected: Tensor,
) -> CompiledRow:
    """Compiles the network. Times it stock, compiled and with sdfastgn. Returns ``row`` with the times."""
    model, call = built(case, device)
    with prepared(VARIANTS["compile_channels_last"], model, "vae"):
        print(f"compiling {case.name}", flush=True)
        seconds, found = timing.time_once(call, device)
        error = relative_error(found, expected)
        print(f"compiled in {seconds:.1f} s, error {error:.1e}", flush=True)
        if not error < MAX_ERROR:
            return replace(row, reason=f"the output of torch.compile has the error {error:.1e}")
        stock_ms, compiled_ms, ours_ms = in_turns((stock, call, ours), device)
    return replace(
        row,
        stock_ms=stock_ms,
        compiled_ms=compiled_ms,
        optimized_ms=ours_ms,
        compile_s=seconds,
        compiled_error=finite(error),
    )


def in_turns(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> list[float]:
    """Times ``calls``, which must have run once before, in turns. Returns the median milliseconds of each."""
    for call in calls:
        for _ in range(WARM_UP):
            timing.time_once(call, device)
    rounds: list[list[float]] = []
    start = time.monotonic()
    while len(rounds) < MIN_CALLS or (
        len(rounds) < MAX_CALLS and time.monotonic() - start < ROUND_SECONDS * len(calls)
    ):
        rounds.append([timing.time_once(call, device)[0] for call in calls])
    return [statistics.median(seconds) * 1e3 for seconds in zip(*rounds, strict=True)]


def _floor_ms(model: nn.Module, call: Callable[[], Tensor], device: torch.device) -> float:
    """Returns the ms of convolutions, matrix products and attention in a call without a CUDA graph."""
    sdfastgn.optimize(model, cuda_graphs=False)
    call()
    took, _ = timing.time_once(call, device)
    parts = profiling.measure(call, None, device, call_ms=took * 1e3, replay_ms=None, recordings=1)
    return parts.floor_ms


def alone(case: Case, file: Path, device: torch.device) -> int:
    """Times a network in this process, and writes ``file`` whenever more of its times are known."""
    start, rows = time.monotonic(), [CompiledRow(case.name, "")]
    with timing.global_switches() as switches:
        where = environment(device, switches)
        timing.spin_up(device)

        def note(row: CompiledRow) -> None:
            print(f"{time.monotonic() - start:5.1f} s  {row}", flush=True)
            rows[0] = row
            documents.write_json(file, documents.document(KIND, where, {}, rows))

        measure(case, device, note)
    return exit_code(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if a network failed or an output was wrong, else 0."""
    parser = argparse.ArgumentParser(
        "python -m scripts.publish.compiled_videos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="+", default=(), help="time only networks whose names begin so")
    parser.add_argument("--device", default="cuda", help="device of the networks")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a network is stopped")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="seconds of all networks together"
    )
    parser.add_argument("--alone", action="store_true", help="time one network, in this process")
    options = parser.parse_args(arguments)
    cases = chosen(options.only)
    if not cases:
        parser.error(
            f"--only {' '.join(options.only)}: no network begins so. The names are: {'; '.join(NAMES)}"
        )
    end, code = time.monotonic() + options.seconds, 0
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if options.alone:
            name = "_".join(re.findall("[a-z0-9]+", case.name.lower()))
            return alone(case, folder / f"{name}.json", torch.device(options.device))
        left = min(options.limit, end - time.monotonic())
        if left <= 0:
            break
        program = [sys.executable, "-m", "scripts.publish.compiled_videos", "--alone", "--only", case.name]
        found = execute([*program, "--folder", str(folder), "--device", options.device], None, left)
        if found is None:
            print(f"stopped after {left:.0f} s: {case.name}", flush=True)
        code = max(code, found or 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
