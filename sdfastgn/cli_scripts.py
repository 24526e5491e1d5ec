"""Commands that no help lists: ``scripts/profile_host.py`` and ``scripts/time_warm_up.py`` run them.

What imports torch is imported inside a command: ``--help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sdfastgn.cli_options import (
    DeviceOption,
    DtypeOption,
    GuidanceOption,
    JsonOption,
    ModelOption,
    SchedulerOption,
    SizeOption,
    StepsOption,
    WeightsOption,
    command,
    one_line_errors,
)


@command(name="profile-host", hidden=True)
def profile_host(
    model: ModelOption = "sdxl",
    size: SizeOption = None,
    steps: StepsOption = 1,
    scheduler: SchedulerOption = None,
    guidance: GuidanceOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", help="Images each way.", show_default="5, on a CPU 2")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Profile what a pipeline does on the CPU around its models, stock and optimized."""
    from sdfastgn.bench import checks, options, session

    with one_line_errors():
        given: dict[str, Any] = {"size": size, "steps": steps, "scheduler": scheduler, "guidance": guidance}
        given |= {"dtype": dtype, "device": device, "repeats": repeats}
        (config,) = options.bench_configs(model=model, parts=["pipeline"], **given)
        checks.file_path("--json", json)
        code = session.run_host(config, json=json)
    raise typer.Exit(code)


@command(name="time-warm-up", hidden=True)
def time_warm_up(
    model: ModelOption = "sdxl",
    size: SizeOption = None,
    new_size: Annotated[
        int | None,
        typer.Option(help="Size in pixels of the UNet steps after the images.", show_default="3/4 of --size"),
    ] = None,
    steps: StepsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "random",
    json: JsonOption = None,
) -> None:
    """Time a pipeline's first images and a new resolution, each way in a process of its own."""
    from sdfastgn.bench import checks, options, session

    with one_line_errors():
        (config,) = options.bench_configs(
            model=model,
            parts=["pipeline"],
            size=size,
            steps=steps,
            dtype=dtype,
            device=device,
            weights=weights,
            repeats=1,
        )
        new_size = config.size * 3 // 32 * 8 if new_size is None else new_size
        checks.image_size("--new-size", new_size)
        checks.file_path("--json", json)
        code = session.run_warm_up(config, new_size, json=json)
    raise typer.Exit(code)
