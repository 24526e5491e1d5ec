"""Lets ``python -m sdfastgn`` run the same command line as the ``sdfastgn`` script."""

from sdfastgn.cli import main

if __name__ == "__main__":
    main()
