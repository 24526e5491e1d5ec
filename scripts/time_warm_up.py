"""First images, a new resolution and peak memory, with an empty and with a full Triton cache.

python scripts/time_warm_up.py --model sdxl --json benchmarks/h200/warm_up_sdxl.json
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "time-warm-up")
