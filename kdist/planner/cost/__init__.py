"""Cost model: time, memory, and money of a training, computed from numbers without TensorFlow."""
