"""Runs rewritten graphs: the functions that their nodes call, and generated Python code that calls kernels.

The functions are the *steps* (``run/steps``). A rewritten graph of a call is a plan.
"""
