"""Placement of a split model's layers and weights on devices."""
