"""Archives of compiled kernels, which ``sdfastgn.optimize`` adds to Triton's cache."""
