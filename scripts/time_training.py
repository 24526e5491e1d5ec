"""Measure time and memory of a training step (forward, loss and backward) of the SDXL UNet at 512x512.

python scripts/time_training.py --dtype fp16 --json train_sdxl.json
python scripts/time_training.py --model sd15 --json train_sd15.json
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "bench", model="sdxl", part=["train"], size=512, dtype="bf16")
