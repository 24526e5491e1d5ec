"""The code behind ``sdfastgn bench``, ``kernels`` and ``report``: it times models and shows the results."""
