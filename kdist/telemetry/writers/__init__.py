"""Destinations of measurements: the run directory, W&B, MLflow, and TensorBoard."""
