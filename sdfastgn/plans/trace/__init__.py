"""Writes down what one call of a model computes, as a graph of ops that write nothing."""
