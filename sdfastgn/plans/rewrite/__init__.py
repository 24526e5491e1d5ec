"""Passes over the graph of a traced call. They replace PyTorch's ops by steps, which call kernels.

The first pass gives each op one form. The later passes then need to look for one form only.
"""
