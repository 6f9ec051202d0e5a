"""Measurements of kdist on an NVIDIA GPU, in parts that survive each other: `make gpu`."""
