"""What every process of `tests.forked` has imported. Nothing here may start TensorFlow."""

import absl.app  # noqa: F401
import keras  # noqa: F401
import sklearn.datasets  # noqa: F401
import tensorflow as tf  # noqa: F401

import kdist.callbacks
import kdist.model
import kdist.strategies  # noqa: F401
