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
_HEAD = """---
search: {{ boost: 0.001 }}
---

# Coverage

This page lists what `sdfastgn.optimize` does to pipelines and models of diffusers {version}. Each row
is one pipeline or model. A test builds it with tiny random weights, and runs it three times: stock
(diffusers' own code), optimized and restored. In every row the optimized output equals stock's
within the dtype's rounding, and the restored output equals stock's bit by bit. The tables show the
results of this test. `python -m tests.coverage.page --write docs/coverage.md` writes this page
again.

- **fused**: in all models of the row, every GroupNorm runs in one kernel with the activation after
  it.
- **partly**: the last column says which parts run stock's code, or an activation in a separate
  pass, and why.
- **plans**: nothing is fused, and calls run as [plans](plans.md) of stock's code, in which norms,
  activations, biases and sums are fused.
- **left alone**: neither. Stock's code runs.

In a step of Kandinsky 3, separate activations take 2.5 % of the time on an H100. They are the SiLU
between the two 1x1 convolutions of a feed-forward. cuBLASLt computes these convolutions, and it
cannot apply SiLU to a product before it writes the result.

The columns "fused", "plans" and "CUDA graphs" name components of the pipeline, or if the row is one
model, the model or its parts. The last column leaves out text encoders and vocoders, which have no
GroupNorm, and modules in plans. [Fusions](fusions.md) explains what each fusion does, and lists
what is left alone on purpose.
"""
_TAIL = """## Real sizes

The table has times of one call of a network at the sizes that people use: a step of a UNet with
guidance, or a decode or an encode of an autoencoder. "Optimized" means the defaults of `optimize`.

- A time is from the start of the call until the GPU has finished. If the CPU launches kernels more
  slowly than the GPU runs them, this is the time of the CPU.
- "Graph" says whether the optimized calls were replays of a CUDA graph.
- "CPU ms" is the time until the CPU has launched all work of an optimized call. If it is shorter
  than the call, the GPU hardly waits for the CPU, and a graph would gain little.
- Errors are relative to the same call in fp32. They were measured only for models of video, and for
  models that ran in bf16. With random weights, the priors of Stable Cascade and Wuerstchen amplify
  rounding errors of bf16 so much that the errors of stock and of sdfastgn are both above 1.
- The UNets and VAEs of SD1.5 and SDXL are in the [benchmarks](benchmarks.md#end-to-end). Single
  layers, and networks in which nothing is fused, are not in the table.

Some networks keep stock's code and layout in calls that are no plans, because `optimize` would make
them slower. This can happen with the autoencoders of HunyuanVideo, HunyuanVideo 1.5, HunyuanImage's
refiner and Mochi. They repeat the border of a video before each convolution, which PyTorch does
slowly in channels-last. In plans a kernel of sdfastgn does it fast.

<!-- table:real_sizes -->
<!-- /table:real_sizes -->

## Video with torch.compile

torch.compile runs in its default mode, on weights in channels-last, and compiles the decoder of the
autoencoder. Calls of stock, torch.compile and sdfastgn take turns in one process. The other
networks of the table above were not compiled.

- "Compiling" and "first call" are the seconds of the first call with torch.compile and with
  sdfastgn, in which both compile kernels. sdfastgn's kernels are kept on disk, so a later process
  takes less.
- "Speed-up" is sdfastgn's, over stock.
- "Floor" is the time of convolutions, matrix products and attention in a call with sdfastgn. The
  call would take this long if all other kernels took no time.

<!-- table:compiled_videos -->
<!-- /table:compiled_videos -->
"""
_COLUMNS = ("", "class", "result", "fused", "plans", "CUDA graphs", "what is not fused, and why")


def line(result):
    """The row of the table for ``result``."""
    cells = (
        result.name,
        f"`{result.kind}`",
        result.verdict,
        ", ".join(f"`{name}`" for name in result.fused) or "-",
        ", ".join(f"`{name}`" for name in result.plans) or "-",
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
