"""What is known of machines before anything runs; nothing here imports TensorFlow."""

from kdist.planner.gpus import Gpu, find_gpu, known_gpus

__all__ = ["Gpu", "find_gpu", "known_gpus"]
