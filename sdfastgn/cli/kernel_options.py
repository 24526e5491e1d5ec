"""Checks the options of ``kernels`` and makes a ``KernelConfig`` for each dtype. Checks raise OptionError."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sdfastgn.bench.kernels.suite import INFERENCE, KernelConfig, Shape, Suite
from sdfastgn.bench.kernels.suites import SUITES
from sdfastgn.cli.bench_options import png_path
from sdfastgn.cli.checks import DIGITS, dtype_word, file_paths, one_of, positive, some_of, split
from sdfastgn.cli.loading import device_name
from sdfastgn.models.configurations import DTYPES
from sdfastgn.program import OptionError

# The default of the option ``--dtype`` of ``sdfastgn kernels``.
DTYPE = "fp16"
_SHAPE = re.compile(rf"{DIGITS}(x{DIGITS})+")


def shape_list(option: str, text: str, suite: Suite) -> tuple[Shape, ...]:
    """The shapes in the list ``text``. An entry is a shape (2x320x64x64) or a key of ``suite.shape_sets``."""
    rule = f" with C divisible by {suite.divisor}" if suite.divisor > 1 else ""
    wanted = f"{suite.axes}{rule}, or one of {', '.join(suite.shape_sets)}"
    shapes: list[Shape] = []
    for entry in split(text):
        if entry in suite.shape_sets:
            shapes += suite.shape_sets[entry]
            continue
        shape = tuple(map(int, entry.split("x"))) if _SHAPE.fullmatch(entry) else ()
        if len(shape) != len(suite.axes.split("x")) or 0 in shape or shape[1] % suite.divisor:
            raise OptionError(f"{option}: cannot use shape {entry!r}; give {wanted}")
        shapes.append(shape)
    if not shapes:
        raise OptionError(f"{option}: no shape in {text!r}; give {wanted}")
    return tuple(dict.fromkeys(shapes))


def _dtype_list(option: str, text: str) -> list[str]:
    return some_of(option, [dtype_word(option, word) for word in split(text)], DTYPES)


def kernel_configs(
    *,
    suite: str = INFERENCE,
    shapes: str = "all",
    names: str | None = None,
    dtypes: str | None = None,
    device: str | None = None,
    repeats: int | None = None,
    seed: int = 0,
) -> list[KernelConfig]:
    """Check the options, and make a config for each dtype in the comma-separated list ``dtypes``.

    The other arguments are options of the command ``kernels``. None means the option's default.
    """
    chosen = SUITES[one_of("--suite", suite, SUITES)]
    known = chosen.providers
    providers = [name for name in known if known[name].by_default or names == "all"]
    if names is not None and names != "all":
        providers = some_of("--providers", names, known)
    return [
        KernelConfig(
            suite,
            shape_list("--shapes", shapes, chosen),
            tuple(providers),
            dtype,
            device_name("--device", device),
            positive("--repeats", chosen.repeats if repeats is None else repeats),
            seed,
            wall_clock=device == "cpu",
        )
        for dtype in _dtype_list("--dtype", dtypes or DTYPE)
    ]


def output_paths(
    configs: Sequence[KernelConfig], *, json: Path | None, plot: Path | None
) -> list[tuple[Path | None, Path | None]]:
    """Returns (path of the JSON, path of the picture) for each config.

    If there are several dtypes, each path contains the dtype of its config.
    """
    suite = configs[0].suite
    unless = "" if suite == INFERENCE else f"only the suite {INFERENCE} has a picture, got {{}} for {suite}"
    places = []
    for config in configs:
        suffix = f"_{config.dtype}" if len(configs) > 1 else ""
        path, picture = (
            each.with_stem(each.stem + suffix) if each and each.name else each for each in (json, plot)
        )
        file_paths({"--json": path, "--plot": png_path("--plot", picture, unless)})
        places.append((path, picture))
    return places
