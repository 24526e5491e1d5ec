"""Runs calls of models as *plans*: upstream's own code, traced once, and rewritten to our kernels.

No file in this room names a model. Its parts, in the order in which a call meets them:

- ``trace``: upstream's Python runs once with tensors that have no memory. Out comes a graph of PyTorch's ops.
- ``rewrite``: passes, each graph in, graph out. They replace what upstream wrote by steps of this package.
- ``run``: the steps, and the plan that runs them.
- ``guard`` and ``forward``: a plan is used as long as the model is what was traced.
"""
