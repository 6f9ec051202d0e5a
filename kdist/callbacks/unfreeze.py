"""Second phase of fine-tuning: trains frozen layers after a number of epochs."""

import functools
import logging
from collections.abc import Iterable

import keras

from kdist.training.state import training_state_of

_logger = logging.getLogger(__name__)


class Unfreeze(keras.callbacks.Callback):
    """Makes layers trainable after a number of epochs.

    Before, build the optimizer with all weights, and then freeze the layers, so that the optimizer
    has variables for the weights that are trained later. Works with plain Keras models as well, and
    a resumed run continues in its phase.

    As Keras's guide to fine-tuning recommends, BatchNormalization layers stay in inference mode:
    their weights are trained, and their moving statistics remain those of the pretrained model.

    Args:
        layers: the frozen layers. Layers inside them become trainable, too.
        after_epochs: number of epochs that are trained before.

    Raises:
        ValueError: `after_epochs` is less than 1.

    Example:

        model.compile(optimizer, "sparse_categorical_crossentropy")
        optimizer.build(model.trainable_variables)
        base.trainable = False
        unfreeze = kdist.callbacks.Unfreeze([base], after_epochs=2)
        model.fit(train, epochs=6, callbacks=[unfreeze])
    """

    def __init__(self, layers: Iterable[keras.layers.Layer], after_epochs: int):
        super().__init__()
        if after_epochs < 1:
            raise ValueError(f"Unfreeze(after_epochs={after_epochs}): give 1 or more")
        self._layers = list(layers)
        self._after_epochs = after_epochs
        self._is_done = False

    def set_model(self, model):
        super().set_model(model)
        state = training_state_of(model)
        if state is not None:  # a resumed run may begin in the second phase
            self._unfreeze_at(state.epoch)

    def on_train_begin(self, logs=None):
        self._unfreeze_if_stopped()

    def on_epoch_begin(self, epoch, logs=None):
        self._unfreeze_at(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self._unfreeze_if_stopped()

    def _unfreeze_if_stopped(self):
        """Unfreezes a training that another callback ended before, also in an earlier process.

        With `use_ema`, `fit` then assigns the averages to all weights that the optimizer knows.
        """
        if self.model.stop_training:
            self._unfreeze_at(self._after_epochs)

    def _unfreeze_at(self, epoch):
        if self._is_done or epoch < self._after_epochs:
            return
        self._is_done = True
        for layer in self._layers:
            layer.trainable = True
            for part in layer._flatten_layers():
                if isinstance(part, keras.layers.BatchNormalization):
                    _keep_statistics(part)
        if self.model.train_function is not None:  # it was traced with fewer weights
            self.model.make_train_function(force=True)
        _logger.info("from epoch %d on, all layers are trained", epoch + 1)


def _keep_statistics(layer):
    """Makes calls of a BatchNormalization layer use its moving statistics, also in training."""
    call = layer.call

    @functools.wraps(call)
    def call_in_inference_mode(inputs, training=None, mask=None):
        return call(inputs, training=False, mask=mask)

    layer.call = call_in_inference_mode
