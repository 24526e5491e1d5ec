"""``python -m sfastgn``: the same command line as the ``sfastgn`` script."""

from sfastgn.cli import main

if __name__ == "__main__":
    main()
