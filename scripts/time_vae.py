"""Time VAE decodes with each variant, to images of the model's own size (512x512 for SD1.5, the default).

python scripts/time_vae.py --size 1024 --model sdxl --json vae_1024.json
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "bench", model="sd15", part=["vae"])
