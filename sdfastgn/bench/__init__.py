"""Measures on a user's machine: the code that ``sdfastgn bench``, ``kernels`` and ``report`` run."""
