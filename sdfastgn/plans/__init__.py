"""Runs calls of models as *plans*. A plan is a list of kernel calls that replaces the Python code of a call.

No file in this folder names a model. A call passes through the parts of the folder in this order:

- ``trace``: the model's own Python code runs once, with tensors that have a shape but no memory. The trace
  records PyTorch's ops as a graph.
- ``rewrite``: passes over the graph. They replace PyTorch's ops by *steps*: functions that call this
  package's kernels, or PyTorch's matrix products and convolutions.
- ``run``: the steps, and the class ``Plan``, which runs the steps of a graph for new tensors.
- ``forward`` runs the plan in later calls. Before or meanwhile, ``guard`` compares the model and its code
  with their state during the trace. If they have changed, the plan is dropped.
"""
