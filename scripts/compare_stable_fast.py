"""Time UNet, VAE and pipeline with stock eager, torch.compile, stable-fast and sdfastgn, in one run.

python scripts/compare_stable_fast.py --model sdxl

Each variant's output is also compared with stock's output in fp32.
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(
        __doc__,
        "bench",
        model="sd15",
        part=["unet", "vae", "pipeline"],
        variants="eager,compile,sdfastgn,stable_fast",
        fp32_reference=True,
    )
