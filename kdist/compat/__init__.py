"""Private interfaces of Keras and TensorFlow, each covered by a test, and the choice of backend."""
