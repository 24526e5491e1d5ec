"""The page on coverage, written from a run: ``python -m tests.coverage.page --write docs/coverage.md``."""

import argparse
from pathlib import Path

import diffusers
import pytest

from scripts.publish.pages import filled
from tests.coverage import networks, relatives, stable_diffusion
from tests.coverage.run import run
from tests.plugin import run_fused_on_cpu

SECTIONS = (*stable_diffusion.SECTIONS, *relatives.SECTIONS, *networks.SECTIONS)
_HEAD = """# Coverage

What `sdfastgn.optimize` does to pipelines and models of diffusers {version}. Each row below is one
pipeline or model. A test builds it with tiny random weights, and runs it three times: stock,
optimized and restored. The optimized output equals stock's within the dtype's rounding, and the
restored one bit by bit, in every row. The tables show the results of this test, and
`python -m tests.coverage.page --write docs/coverage.md` renews this page.

- **fused**: in each of diffusers' models, every GroupNorm and the operations after it run fused. In
  the autoencoders of Wan, Qwen-Image, HunyuanVideo 1.5, HunyuanImage's refiner, LTX-Video and LTX-2
  it is every RMSNorm.
- **partly**: the last column says which parts keep stock's code or a separate pass, and why.
- **left alone**: nothing is fused, and the call is stock's.

Text encoders and vocoders have no GroupNorm and no row. [Fusions](fusions.md) explains
what each fusion does. It also lists the layers that are left alone on purpose.
"""
_TAIL = """## Real sizes

One call of a network at the sizes that people use, stock and optimized with the defaults of
`optimize`: a step of a UNet with guidance, or a decode of an autoencoder. A call is waited for, so
where the CPU is slower than the GPU, the time is the CPU's. "Graph" says whether calls were replays
of a CUDA graph. "CPU ms" is the time until all work of an optimized call is launched. Where it is
shorter than the call, a graph would gain nothing. Errors are relative to the same call in fp32;
they are measured for videos and in bf16. With random weights, the priors of Stable Cascade and
Wuerstchen amplify the rounding of bf16 until errors are above 1, stock's and optimized alike. The
UNets and VAEs of SD1.5 and SDXL are among the [benchmarks](benchmarks.md#end-to-end). Single layers
and networks in which nothing is fused have no line.

A network that would be slower keeps stock's code and layout, and the report says why. The
autoencoders of HunyuanVideo, HunyuanVideo 1.5, HunyuanImage's refiner and Mochi repeat the border
of a video before each convolution, and PyTorch does that slowly in channels-last. A kernel repeats
their borders. If one of these convolutions cannot be fused, the whole autoencoder stays as it is.

<!-- table:real_sizes -->
<!-- /table:real_sizes -->
"""
_COLUMNS = ("", "class", "result", "fused", "CUDA graphs", "what is not fused, and why")


def line(result):
    """The row of the table for ``result``."""
    cells = (
        result.name,
        f"`{result.kind}`",
        result.verdict,
        ", ".join(f"`{name}`" for name in result.fused) or "-",
        ", ".join(f"`{name}`" for name in result.graphs) or "-",
        "; ".join(result.left) or "-",
    )
    return f"| {' | '.join(cells)} |"


def page(results):
    """The whole page for the results of each section."""
    parts = [_HEAD.format(version=diffusers.__version__)]
    for section, found in zip(SECTIONS, results, strict=True):
        rows = [
            f"| {' | '.join(_COLUMNS)} |",
            "| " + " | ".join(["---"] * len(_COLUMNS)) + " |",
            *map(line, found),
        ]
        parts.append(f"## {section.title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, _TAIL])


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.coverage.page", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", required=True)
    path = parser.parse_args().write
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_fused_on_cpu(monkeypatch)
        text = page([run(row) for row in section] for section in SECTIONS)
        path.write_text(filled(text, Path("benchmarks")), encoding="utf-8")


if __name__ == "__main__":
    main()
