"""Samplers of the devices of each task of a job."""
