"""Batching policy: load monitoring, simulation, and the choice of settings."""
