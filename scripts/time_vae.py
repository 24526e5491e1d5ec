"""VAE decodes: latents to images of 512x512 (``--size 1024`` for SDXL's); a row a variant.

python scripts/time_vae.py --size 1024 --model sdxl --json vae_1024.json
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "bench", model="sd15", part=["vae"])
