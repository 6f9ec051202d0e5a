"""Destinations of measurements: the run directory, W&B, and TensorBoard."""
