"""The command line of ``scripts/``: the harness of ``sfastgn bench`` with each script's own defaults."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def refuse(error: Exception) -> NoReturn:
    """Ends a script for bad input: one line on standard error, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    sys.exit(2)


def _parser(doc: str, model: str, variants: str, size: int | None, dtype: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=model, help=f"architecture (default: {model})")
    own_size = f"{size}" if size else "what the model was made for"
    own_dtype = dtype or "fp16 on a GPU, fp32 on the CPU"
    parser.add_argument("--size", type=int, default=size, help=f"pixels of the square image (default: {own_size})")
    parser.add_argument("--steps", type=int, default=30, help="UNet steps (default: 30)")
    parser.add_argument("--batch", type=int, default=1, help="images a call (default: 1)")
    parser.add_argument("--dtype", default=dtype, help=f"fp16, bf16 or fp32 (default: {own_dtype})")
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: cuda where there is a GPU)")
    parser.add_argument("--weights", default="random", help="random, a path, or a Hub id (default: random)")
    parser.add_argument("--variants", default=variants, help=f"comma list, or all (default: {variants})")
    parser.add_argument("--repeats", type=int, help="timed calls of each variant")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser


def main(
    doc: str | None,
    *,
    model: str,
    part: str,
    variants: str = "all",
    size: int | None = None,
    dtype: str | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Runs one part of the harness and exits: 0, 1 where an output was wrong, 2 for bad input, which it names in one line.

    Args:
        doc: the script's docstring, shown by ``--help``.
        model, part, variants, size, dtype: the script's defaults; the user can change all but the part.
        arguments: instead of ``sys.argv[1:]``.
    """
    given = _parser(doc or "", model, variants, size, dtype).parse_args(arguments)
    # transformers advises on optional packages at import, which is no news to a user of a script.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from sfastgn.bench import options, session
    from sfastgn.bench.workloads import WeightsError

    try:
        configs = options.bench_configs(
            model=given.model,
            parts=[part],
            size=given.size,
            batch=given.batch,
            steps=given.steps,
            dtype=given.dtype,
            device=given.device,
            weights=given.weights,
            repeats=given.repeats,
        )
        chosen = options.variant_list("--variants", given.variants)
        code = session.run_bench(configs, chosen, json=options.json_path("--json", given.json))
    except (options.OptionError, WeightsError) as error:
        refuse(error)
    sys.exit(code)
