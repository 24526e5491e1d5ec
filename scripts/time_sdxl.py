"""Time whole SDXL pipelines with each variant: text encoders, 30 UNet steps with guidance, VAE decode.

python scripts/time_sdxl.py --json pipeline_sdxl.json
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "bench", model="sdxl", part=["pipeline"])
