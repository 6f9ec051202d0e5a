"""Hides packages that kdist does not require from every Python process of a job under test.

TensorFlow and Keras import JAX and Matplotlib if they are installed, which takes a sixth of the
start of a task. Jobs that are killed and restarted start many tasks.
"""

import sys

sys.modules.update(dict.fromkeys(("jax", "matplotlib")))
