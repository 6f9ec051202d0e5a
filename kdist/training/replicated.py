"""Training on every synchronous strategy: the same step on each replica, one update."""

from kdist.training.keras_internals import TensorFlowTrainer


class ReplicatedTrainer(TensorFlowTrainer):
    """Keras's TensorFlow trainer, with kdist's functions and loops."""
