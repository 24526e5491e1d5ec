"""A small diffusion model trained on digits, stock and optimized, from one seed: do they agree?

python scripts/train_digits.py --steps 300
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "train-digits")
