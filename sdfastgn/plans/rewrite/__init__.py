"""Passes over a traced graph: one spelling for each op, then kernels instead of the ops of upstream."""
