"""A trained pipeline of handwritten digits, its prompts, and what reads its images.

``scripts/digits/train.py`` trained it. The folder's README has the data and the license.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sdfastgn.program import OptionError

# A StableDiffusionPipeline as save_pretrained writes it, and the classifier's weights. Only a checkout
# has them: the wheel would be nine times as large.
FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "digits"
CLASSIFIER = "classifier.safetensors"
NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Red, green and blue in [0, 1] of the ink, on white paper, by its word in a prompt.
INKS = {
    "": (0.0, 0.0, 0.0),
    "red": (0.85, 0.1, 0.1),
    "green": (0.05, 0.55, 0.15),
    "blue": (0.1, 0.25, 0.85),
    "orange": (0.95, 0.5, 0.05),
    "purple": (0.55, 0.15, 0.7),
}
WORDS = ("handwritten", *NUMERALS, *filter(None, INKS))
# Pixels of the square image that it was trained on.
SIZE = 64
STEPS = 20
GUIDANCE = 3.0


def check_folder() -> None:
    """Raises OptionError outside of a checkout, where there is no pipeline."""
    if not FOLDER.is_dir():
        where = "it is in a checkout of sdfastgn's repository and not in the installed package"
        raise OptionError(f"demo: no trained pipeline at {str(FOLDER)!r}: {where}; run sdfastgn demo there")


def prompt_of(digit: int, ink: str = "") -> str:
    """What to ask for: ``"a red handwritten seven"``, or of black ink ``"a handwritten seven"``.

    Orange has the article ``a``, too: the pipeline was trained on no other.
    """
    return " ".join(filter(None, ("a", ink, "handwritten", NUMERALS[digit])))


def generate(pipe: Any, prompts: list[str], **options: Any) -> np.ndarray:
    """One image (H, W, 3) in [0, 1] for each prompt, from the same noise at each call."""
    settings = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "np", **options}
    # A CPU generator gives the same noise on every device.
    return pipe(prompts, generator=torch.Generator("cpu").manual_seed(0), **settings).images


def build_classifier() -> nn.Module:
    """Logits of the ten digits for how much ink (N, 1, H, W) the paper has, from 0 to 1."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def ink_of(images: Tensor) -> Tensor:
    """Ink (N, 1, H, W) of images (N, 3, H, W) in [0, 1]: all inks lack some color that paper has."""
    return 1 - images.amin(dim=1, keepdim=True)


def read(images: np.ndarray, folder: Path = FOLDER) -> list[int]:
    """The digit that the classifier sees in each image (H, W, 3) in [0, 1]."""
    classifier = build_classifier()
    classifier.load_state_dict(load_file(folder / CLASSIFIER))
    with torch.inference_mode():
        return classifier(ink_of(torch.from_numpy(images).movedim(-1, 1))).argmax(dim=1).tolist()
