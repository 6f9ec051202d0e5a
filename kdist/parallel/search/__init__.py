"""Finds the placement of a split model from the costs of its operations."""
