"""Sharded data parallelism: training state that is divided among replicas."""
