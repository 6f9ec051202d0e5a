"""Validates and saves a model with the moving averages of its weights."""

import keras
import tensorflow as tf

from kdist.training.sharding.optimizer_state import shards_of


class AveragedWeights(keras.callbacks.SwapEMAWeights):
    """Swaps in the moving averages of an optimizer with `use_ema` for validation and files.

    It is `keras.callbacks.SwapEMAWeights(swap_on_epoch=True)` with three differences. The swap is
    exact, whereas Keras adds and subtracts, which rounds. Weights that are not trainable stay as
    they are. If another callback ends the training, such as EarlyStopping, the model has the
    averages, too. Place this callback after that one, and before those that write files.

    Example:

        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.999), "mse")
        stop = keras.callbacks.EarlyStopping(patience=3)
        averaged = kdist.callbacks.AveragedWeights()
        best = keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True)
        model.fit(train, validation_data=test, epochs=30, callbacks=[stop, averaged, best])
    """

    def __init__(self):
        super().__init__(swap_on_epoch=True)

    def on_epoch_end(self, epoch, logs=None):
        if self.model.stop_training:
            # `fit` ends by assigning the averages, which Keras restores in the last epoch only.
            self.set_params({**self.params, "epochs": epoch + 1})
        super().on_epoch_end(epoch, logs)

    def _tf_swap_variables(self, optimizer):
        copies = self.model.distribute_strategy.experimental_local_results
        shards = shards_of(optimizer)
        if shards is not None:
            shards.swap_averages()
            return
        for weight, average in zip(
            optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True
        ):
            if not weight.trainable:
                continue
            for own, mean in zip(copies(weight.value), copies(average.value), strict=True):
                value = tf.identity(own)
                own.assign(mean)
                mean.assign(value)
