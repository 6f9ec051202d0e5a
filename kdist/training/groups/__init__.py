"""Groups of training steps that one call of a TensorFlow function runs."""
