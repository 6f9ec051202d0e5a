"""Inspection of executed graphs: devices of operations, activation memory, and transfers."""
