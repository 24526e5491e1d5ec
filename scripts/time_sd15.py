"""Time whole SD1.5 pipelines with each variant: text encoder, 30 UNet steps with guidance, VAE decode.

python scripts/time_sd15.py --json pipeline_sd15.json
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "bench", model="sd15", part=["pipeline"])
