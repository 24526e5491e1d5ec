"""Full pipelines of stock eager, sdfastgn and the stable-fast package side by side.

python scripts/compare_stable_fast.py --model sdxl
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "bench", model="sd15", part=["pipeline"], variants="eager,sdfastgn,stable_fast")
