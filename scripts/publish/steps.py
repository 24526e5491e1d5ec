"""The measurements that one command can repeat. Each measurement is called a step: an entry of ``STEPS``.

``scripts.publish.renew`` runs the steps. All together take at most ``MOST_SECONDS`` on one GPU. A new table
needs a step here (or results in ``benchmarks/by_hand``), a function in ``scripts.publish.pages.TABLES`` and a
place on a page.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Folder of the committed results of the last renewal (a repetition of all steps at one commit on one GPU).
# The pages show them.
RESULTS = ROOT / "benchmarks" / "renewal"
# Maximum number of seconds that all steps may take together on one H100 or H200.
MOST_SECONDS = 25 * 60
# Name of the file that a renewal writes beside its results. It has the commit, the GPU, and each step's
# outcome.
SUMMARY = "renewal.json"


@dataclass(frozen=True)
class Step:
    """One measurement, which runs in a fresh process.

    Attributes:
        writes: the file that the step makes, relative to the folder of the results.
        command: the module that ``python -m`` runs, and its options except ``option``.
        tiny: options that are appended for a dry run on a CPU. They override the same options in ``command``.
        feeds: names of the tables and pictures that show results of this step.
        budget: number of seconds that the step may take on an H100, including the start of its process.
        option: the option of the command whose value is the path of the file. If it is ``--output``, its
            value is the path of the file's folder.
    """

    writes: str
    command: str
    tiny: str
    feeds: tuple[str, ...]
    budget: int
    option: str = "--json"

    @property
    def name(self) -> str:
        return self.writes.rpartition(".")[0]

    def arguments(self, path: Path, *, tiny: bool) -> list[str]:
        """Returns the whole command line that writes the step's file to ``path``."""
        place = path.parent if self.option == "--output" else path
        options = shlex.split(self.command) + (shlex.split(self.tiny) if tiny else [])
        return [sys.executable, "-m", *options, self.option, str(place)]


def origin(content: dict[str, Any]) -> tuple[str | None, str | None]:
    """Returns (commit, GPU) from a run's JSON. They are the same for all results of a renewal."""
    where = content["environment"]
    return (where.get("git") or {}).get("commit"), where.get("gpu")


_MODEL = "--model tiny --size 64 --device cpu"
_BENCH = f"{_MODEL} --dtype fp32 --repeats 1 --variants eager,sdfastgn"
_KERNELS = "--device cpu --repeats 1"

# All steps, in the order in which they run. Those that write sd15.json and sdxl.json measure how long
# torch.compile's first call takes. No other step runs torch.compile before them, because its cache on disk
# would shorten this time.
STEPS = (
    # ---- adapters, training, large images
    *(
        Step(
            f"train_{model}.json",
            f"sdfastgn bench --model {model} --part train --lora-rank 4 --batch {batch} --repeats 10"
            " --variants eager,sdfastgn,sdfastgn_eager",
            f"{_BENCH} --batch 1",
            ("results",),
            budget,
        )
        for model, batch, budget in (("sd15", 4, 70), ("sdxl", 1, 56))
    ),
    Step(
        "adapters.json",
        "scripts.publish.adapters",
        "--model tiny --device cpu",
        ("adapters",),
        190,
    ),
    Step(
        "tiled_decode.json",
        "scripts.publish.tiled_decode",
        "--model tiny --device cpu --size 64",
        ("tiled_decode",),
        58,
    ),
    # ---- UNet steps, VAE decodes and pipelines
    Step(
        "sd15.json",
        "sdfastgn bench --model sd15 --part unet --part vae --fp32-reference --repeats 10"
        " --variants eager,sdfastgn,sdfastgn_eager,compile",
        _BENCH,
        ("claims", "headline", "results", "compared", "times.png"),
        100,
    ),
    Step(
        "sdxl.json",
        "sdfastgn bench --model sdxl --part unet --part vae --fp32-reference --repeats 10"
        " --variants eager,sdfastgn,sdfastgn_eager,compile",
        _BENCH,
        ("claims", "headline", "results", "compared", "times.png"),
        160,
    ),
    Step(
        "pipeline_sd15.json",
        "sdfastgn bench --model sd15 --part pipeline --repeats 5 --variants eager,sdfastgn",
        f"{_BENCH} --steps 2",
        ("claims", "headline", "results", "compared", "times.png"),
        35,
    ),
    Step(
        "pipeline_sdxl.json",
        "sdfastgn bench --model sdxl --part pipeline --repeats 5 --variants eager,sdfastgn",
        f"{_BENCH} --steps 2",
        ("claims", "headline", "results", "compared", "times.png"),
        52,
    ),
    # ---- batches, few steps, first images, where the time goes
    Step(
        "batches_sdxl.json",
        "sdfastgn bench --model sdxl --part unet --batch 1,8 --repeats 5 --variants eager,sdfastgn",
        f"{_BENCH} --batch 1,2",
        ("batches",),
        32,
    ),
    Step(
        "latency_sdxl.json",
        "sdfastgn bench --model sdxl --part pipeline --size 512 --scheduler EulerAncestralDiscreteScheduler"
        " --guidance 0 --steps 1,4 --repeats 10 --variants eager,sdfastgn",
        f"{_BENCH} --steps 1,2",
        ("latency",),
        32,
    ),
    Step(
        "warm_up_sdxl.json",
        "scripts.publish.warm_up --model sdxl",
        f"{_MODEL} --dtype fp32 --steps 2",
        ("warm_up",),
        66,
    ),
    Step(
        "profile_sdxl.json",
        "sdfastgn bench --model sdxl --part unet --part vae --profile --repeats 10 --variants eager,sdfastgn",
        _BENCH,
        ("profile", "profile_sdxl.png"),
        45,
    ),
    # ---- single operations
    Step(
        "kernels.json",
        "sdfastgn kernels --repeats 10 --providers eager_nchw,eager_nhwc,inductor,sdfastgn",
        f"{_KERNELS} --shapes 1x64x4x4 --providers eager_nhwc,sdfastgn",
        ("kernels", "roofline_fp16.png"),
        130,
    ),
    Step(
        "kernels_layer_norm.json",
        "sdfastgn kernels --suite layer_norm --shapes unet",
        f"{_KERNELS} --shapes 8x32",
        ("layer_norm",),
        14,
    ),
    # ---- other networks: each step times a quarter of them
    *(
        Step(
            f"real_sizes/{part}.json",
            f"scripts.publish.real_sizes --part {part}",
            "--device cpu --only UNet1DModel",
            ("real_sizes", "video"),
            110,
        )
        for part in (1, 2, 3, 4)
    ),
    Step("demo.png", "sdfastgn demo", "", ("demo.png",), 18, option="--output"),
)
