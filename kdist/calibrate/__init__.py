"""Calibrates the planner on a machine by timing small networks."""
