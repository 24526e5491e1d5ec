"""Measuring on a user's own machine: what ``sdfastgn bench``, ``kernels`` and ``report`` run."""
