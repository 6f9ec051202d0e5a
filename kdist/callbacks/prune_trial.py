"""Early end of a training that an Optuna study considers not worth continuing."""

import keras

from kdist.training.scopes import is_multi_worker


class PruneTrial(keras.callbacks.Callback):
    """Reports a metric of each epoch to an Optuna trial, and ends `fit` if the trial is pruned.

    The training ends as with early stopping, so that other callbacks complete their files. Then
    `fit` raises `optuna.TrialPruned`, which Optuna expects. Pass this callback last, since Keras
    skips the callbacks after it.

    Args:
        trial: trial of `optuna`, or of `kdist.tuning.optuna.optimize`.
        monitor: name of the metric in the logs of an epoch. Defaults to `"val_loss"`.

    Raises:
        ValueError: In `fit`: the logs have no such metric, or several workers train the model, each
            of which would ask the study.
        optuna.TrialPruned: In `fit`: the trial is pruned.

    Example:

        def objective(trial):
            model = build(learning_rate=trial.suggest_float("learning_rate", 1e-4, 1, log=True))
            prune = kdist.callbacks.PruneTrial(trial, "val_accuracy")
            history = model.fit(train, validation_data=test, epochs=10, callbacks=[prune])
            return history.history["val_accuracy"][-1]
    """

    def __init__(self, trial, monitor: str = "val_loss"):
        super().__init__()
        self._trial, self._monitor = trial, monitor
        self._is_pruned = False

    def on_train_begin(self, logs=None):
        self._is_pruned = False
        strategy = getattr(self.model, "distribute_strategy", None)  # absent with other backends
        if strategy is not None and is_multi_worker(strategy):
            raise ValueError(
                "PruneTrial in a job of several workers: each of them would report to the trial; "
                "leave it out, or train each trial on one host"
            )

    def on_epoch_end(self, epoch, logs=None):
        if self._monitor not in (logs or {}):
            raise ValueError(
                f"no metric {self._monitor!r} in the logs of an epoch; PruneTrial(monitor=…) may "
                f"be one of {', '.join(sorted(logs or {}))}"
            )
        self._trial.report(float(logs[self._monitor]), epoch + 1)
        if self._trial.should_prune():
            self._is_pruned = self.model.stop_training = True

    def on_train_end(self, logs=None):
        if self._is_pruned:
            import optuna

            raise optuna.TrialPruned
