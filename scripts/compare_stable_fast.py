"""Full pipelines of stock eager, sfastgn and the real stable-fast package side by side, from prompt to image.

python scripts/compare_stable_fast.py --model sdxl
"""

from sfastgn.bench.scripting import main

if __name__ == "__main__":
    main(__doc__, model="sd15", part="pipeline", variants="eager,sfastgn,stable_fast")
