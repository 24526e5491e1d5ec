"""The demo's pipeline of handwritten digits, its prompts, and a classifier that reads its images.

``scripts/digits/train.py`` trained the pipeline. The README in ``scripts/digits`` names the data and
the license.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sdfastgn.program import OptionError

# The folder of the pipeline and the classifier. Only a checkout has it, because it would make the wheel too
# large.
FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "digits"
CLASSIFIER = "classifier.safetensors"
NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Word for an ink in a prompt -> red, green and blue of the ink in [0, 1]. The paper is white.
INKS = {
    "": (0.0, 0.0, 0.0),
    "red": (0.85, 0.1, 0.1),
    "green": (0.05, 0.55, 0.15),
    "blue": (0.1, 0.25, 0.85),
    "orange": (0.95, 0.5, 0.05),
    "purple": (0.55, 0.15, 0.7),
}
WORDS = ("handwritten", *NUMERALS, *filter(None, INKS))
# Pixels along a side of the square images that the pipeline was trained on.
SIZE = 64
STEPS = 20
GUIDANCE = 3.0


def find_folder() -> Path:
    """The folder of the pipeline and the classifier. Raises OptionError if it is not found.

    If this file is in a checkout, the folder is ``FOLDER``. If sdfastgn is installed as a package, the folder
    is found only if the current folder is a checkout.
    """
    places = (FOLDER, Path("scripts", "digits").absolute())
    for place in places:
        if (place / CLASSIFIER).is_file():
            return place
    where = "it is in a checkout of sdfastgn's repository and not in the installed package"
    tried = " or ".join(repr(str(place)) for place in places)
    raise OptionError(f"demo: no trained pipeline at {tried}: {where}; run sdfastgn demo in the checkout")


def prompt_of(digit: int, ink: str = "") -> str:
    """The prompt for a digit: ``"a red handwritten seven"``, or for black ink ``"a handwritten seven"``.

    The article is always ``a``, even before "orange", because the pipeline was trained with such prompts.
    """
    return " ".join(filter(None, ("a", ink, "handwritten", NUMERALS[digit])))


def generate(pipe: Any, prompts: list[str], **options: Any) -> np.ndarray:
    """Draws an image for each prompt, and returns them as (N, H, W, 3) in [0, 1].

    All calls start from the same noise.
    """
    settings = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "np", **options}
    # A CPU generator gives the same noise on every device.
    return pipe(prompts, generator=torch.Generator("cpu").manual_seed(0), **settings).images


def build_classifier() -> nn.Module:
    """A network that maps the amount of ink, (N, 1, H, W) in [0, 1], to logits of the ten digits, (N, 10)."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def ink_of(images: Tensor) -> Tensor:
    """The amount of ink at each pixel, (N, 1, H, W) in [0, 1], of images (N, 3, H, W) in [0, 1].

    It is 1 - min(red, green, blue). Every ink is dark in at least one of the three colors, and white paper is
    bright in all three.
    """
    return 1 - images.amin(dim=1, keepdim=True)


def read(images: np.ndarray, folder: Path = FOLDER) -> list[int]:
    """The digits that the classifier sees in ``images`` (N, H, W, 3), with values in [0, 1]."""
    classifier = build_classifier()
    classifier.load_state_dict(load_file(folder / CLASSIFIER))
    with torch.inference_mode():
        return classifier(ink_of(torch.from_numpy(images).movedim(-1, 1))).argmax(dim=1).tolist()
