"""A small pixel diffusion model trained on scikit-learn's digits, stock and optimised, on the same batches: do they learn alike?

python scripts/train_digits.py --steps 2000 --dtype bf16 --stock-repeat --json benchmarks/h200/train_digits_bf16.json
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "train-digits")
