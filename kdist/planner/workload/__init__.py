"""Workload: the work of one training step of a model, layer by layer."""
