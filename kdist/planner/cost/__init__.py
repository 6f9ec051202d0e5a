"""What training costs in time, as pure functions of numbers; nothing here imports TensorFlow."""
