"""Exports trained models in the formats that model servers read."""
