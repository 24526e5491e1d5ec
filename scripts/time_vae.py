"""Time VAE decodes to images of 512x512 (for SDXL use ``--size 1024``) with each variant.

python scripts/time_vae.py --size 1024 --model sdxl --json vae_1024.json
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "bench", model="sd15", part=["vae"])
