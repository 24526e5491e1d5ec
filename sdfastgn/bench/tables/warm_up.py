"""A table that shows how long a process waits for a pipeline's first images, and how much memory it takes.

``scripts.publish.warm_up`` makes the measurements. The table is made in this package because
``sdfastgn report`` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdfastgn.bench.documents import OK
from sdfastgn.bench.tables.blocks import Blocks
from sdfastgn.bench.tables.cells import NOTHING

# A run whose results are ``WaitRow``s has this value in the field ``kind`` of its JSON.
KIND = "warm_up"


@dataclass(frozen=True)
class WaitRow:
    """How long one process waits for its first images. It has no times if the last image is wrong.

    Attributes:
        image_s: seconds for each of the process's first images. The first number includes ``optimize``.
        new_size_s: seconds for each of the first UNet steps at an image size that is new to the process.
        peak_mib: maximum memory that tensors occupied while the images were made; None on the CPU.
        reserved_mib: maximum memory of the GPU that PyTorch's CUDA allocator held during the same time; None
            on the CPU.
        psnr_db: PSNR of the last image against stock's image. None for stock itself, and if the images are
            equal.
    """

    variant: str
    image_s: list[float]
    new_size_s: list[float]
    peak_mib: float | None
    reserved_mib: float | None
    psnr_db: float | None = None
    status: str = OK
    reason: str = ""

    @property
    def second_image_s(self) -> float:
        """Seconds from the start until the second image is done."""
        return sum(self.image_s[:2])

    @property
    def new_size_over_s(self) -> float:
        """Seconds that the first steps at a new size took longer than later steps would have, in total.

        The time of the last step is taken as the time of a later step.
        """
        return sum(self.new_size_s) - len(self.new_size_s) * self.new_size_s[-1]


def result_table(content: dict[str, Any]) -> Blocks:
    """The table of one run. ``content``: the run's JSON, whose field ``kind`` is ``KIND``."""
    (part,) = content["config"]["parts"]
    shown = warm_up_table([WaitRow(**values) for values in content["rows"]])
    return replace(shown, title=f"first images, {part['model']} {part['size']}²")


def warm_up_table(rows: Sequence[WaitRow]) -> Blocks:
    """A table with a row for each variant. A row has no times if the variant's image was wrong."""
    seconds = ("second image after s", "over eager s", "third image s", "new size, over replays s")
    header = ("variant", *seconds, "peak MiB", "reserved MiB", "PSNR dB")
    notes = [f"{row.variant}: {row.status}: {row.reason}" for row in rows if row.status != OK]
    return Blocks(header, [_wait_cells(row, rows[0]) for row in rows], notes=notes)


def _wait_cells(row: WaitRow, eager: WaitRow) -> list[str]:
    if row.status != OK:
        return [row.variant, row.status]
    over = row.second_image_s - eager.second_image_s if eager.image_s and row is not eager else None
    cells = (
        (row.second_image_s, ".2f"), (over, "+.2f"), (row.image_s[-1], ".3f"), (row.new_size_over_s, ".3f"),
        (row.peak_mib, ".0f"), (row.reserved_mib, ".0f"), (row.psnr_db, ".1f"),
    )  # fmt: skip
    return [row.variant, *(NOTHING if value is None else format(value, spec) for value, spec in cells)]
