"""``sdfastgn generate``: draws an image for a prompt, or for each line of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sdfastgn.cli.app import command
from sdfastgn.cli.errors import one_line_errors
from sdfastgn.cli.options import DeviceOption, DtypeOption, checked_guidance, checked_seed

PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help="Text file with one prompt per line, or .jsonl file with one object of settings per line."
    ),
]
PromptOption = Annotated[
    str | None, typer.Option(help="A single prompt, instead of a file. It counts as line 1.")
]
OwnStepsOption = Annotated[
    int | None,
    typer.Option(
        help="Denoising steps. Turbo models cannot be recognized, and need 1 to 4.",
        show_default="the pipeline's own, or 4 with the scheduler of LCM or TCD",
    ),
]
OwnGuidanceOption = Annotated[
    float | None,
    typer.Option(
        callback=checked_guidance,
        help="Guidance scale. Turbo models cannot be recognized, and need 0.",
        show_default="the pipeline's own, or 1 with the scheduler of LCM or TCD if the UNet takes none",
    ),
]


@command()
def generate(
    model: Annotated[str, typer.Option(help="Saved text-to-image pipeline: a path, or a Hub id.")],
    out: Annotated[str, typer.Option(help="Folder for the images. The image of line 12 is 00012.png.")],
    prompts: PromptsOption = None,
    prompt: PromptOption = None,
    negative_prompt: Annotated[
        str | None, typer.Option(help="Negative prompt for lines that have none.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Maximal number of images per call.")] = 1,
    width: Annotated[
        int | None, typer.Option(help="Width of the images in pixels.", show_default="the model's own")
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Height of the images in pixels.", show_default="the model's own")
    ] = None,
    steps: OwnStepsOption = None,
    guidance: OwnGuidanceOption = None,
    seed: Annotated[
        int, typer.Option(callback=checked_seed, help="The seed of line 12 is this number plus 12.")
    ] = 0,
    variant: Annotated[str | None, typer.Option(help="Variant of the model's files, such as fp16.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    stock: Annotated[bool, typer.Option("--stock", help="Draw without sdfastgn.optimize.")] = False,
) -> None:
    """Draw an image for a prompt, or for each line of a file.

    With accelerate launch or torchrun it uses all GPUs.
    """
    from sdfastgn.cli import checks
    from sdfastgn.cli.prompts import checked_job

    line: dict[str, Any] = {"negative_prompt": negative_prompt, "width": width, "height": height}
    line |= {"steps": steps, "guidance": guidance, "seed": seed}
    files: dict[str, Any] = {"model": model, "prompts": prompts, "prompt": prompt, "out": out}
    with one_line_errors():
        checks.device_word("--device", device)
        how: dict[str, Any] = {"batch_size": batch_size, "variant": variant, "dtype": dtype, "stock": stock}
        job = checked_job(**files, settings=line, **how)
        # ``drawing`` is imported after the checks of the options, because its import takes seconds.
        from sdfastgn.cli.drawing import run

        code = run(job, device)
    raise typer.Exit(code)
