"""Keras callback that ends trials of Optuna which fall behind the others."""

import keras
import optuna

from kdist.strategies import num_workers


class PruningCallback(keras.callbacks.Callback):
    """Reports a metric to an Optuna trial after each epoch, and ends a trial that is pruned.

    Works with plain Keras models as well. The study's pruner compares the trial with the others at
    the same epoch. It follows the study's direction: create the study with `direction="maximize"`
    for an accuracy.

    Args:
        trial: The `optuna.Trial` that the objective receives.
        monitor: Name of a value in the logs of an epoch. Defaults to `"val_accuracy"`.

    Raises:
        optuna.TrialPruned: The trial should be pruned. `run_trials` and `study.optimize` record it.
        ValueError: The logs of an epoch do not contain `monitor`, or the model trains on several
            workers. One worker that is pruned would leave the others waiting.

    Example:

        def objective(trial):
            model = build(trial.suggest_float("rate", 1e-5, 1.0, log=True))
            history = model.fit(
                train, epochs=5, validation_data=test, callbacks=[PruningCallback(trial)]
            )
            return history.history["val_accuracy"][-1]
    """

    def __init__(self, trial: optuna.Trial, monitor: str = "val_accuracy"):
        super().__init__()
        self._trial = trial
        self._monitor = monitor

    def set_model(self, model):
        super().set_model(model)
        strategy = getattr(model, "distribute_strategy", None)  # absent with other backends
        workers = 1 if strategy is None else num_workers(strategy)
        if workers > 1:
            raise ValueError(
                f"PruningCallback: the model trains on {workers} workers, and a pruned trial would "
                "end only one of them. Use a strategy of one process, such as mirrored"
            )

    def on_epoch_end(self, epoch, logs=None):
        logs = logs or {}
        if self._monitor not in logs:
            raise ValueError(
                f"PruningCallback(monitor={self._monitor!r}): the logs contain "
                f"{', '.join(sorted(logs)) or 'nothing'}. Choose one of them, or pass "
                "validation_data and metrics"
            )
        value = float(logs[self._monitor])
        self._trial.report(value, step=epoch)
        if self._trial.should_prune():
            raise optuna.TrialPruned(f"{self._monitor} was {value:.4g} after epoch {epoch + 1}")
