"""Dependence of a step's tensors on the rows of the batch, read from the step's graph."""
