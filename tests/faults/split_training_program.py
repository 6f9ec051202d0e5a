"""Training of a split model, for tests that disturb it; ends with the exported model.

python split_training_program.py LAYOUT DIRECTORY OUTPUT

Checkpoints go to DIRECTORY. After training, the directory of OUTPUT has `served`, a SavedModel;
`model.keras`; `weights.npz`; and `predicted.npz`, input tokens and the trained model's predictions.
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np

import kdist
from kdist.parallel import column, heads, row, split, stage

# A step takes a few milliseconds; the pause lets the kill happen during training.
SECONDS_PER_STEP = 0.1
ROWS, BATCH, EPOCHS = 160, 16, 3
STEPS = EPOCHS * ROWS // BATCH

TENSOR_PARALLEL = {
    "token_embedding": row(),
    ".*_attention": heads(),
    ".*_up": column(),
    ".*_down": row(),
}
PIPELINE = {"block1_ffn_norm": stage(1)}


def examples():
    """Returns tokens (B, T) and classes (B,)."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 20, (ROWS, 6)).astype("int32"), generator.integers(0, 3, ROWS)


def build(layout):
    """Returns the compiled model, in the scope of the layout's strategy."""
    strategy = kdist.create_strategy(layout)
    keras.utils.set_random_seed(1)
    plain = kdist.models.transformer(
        (6,), 3, vocabulary_size=20, width=16, heads=4, depth=1, dropout=0.0
    )
    with strategy.scope():
        if layout.group_size == 1:
            model = kdist.Model.of(plain)
        else:
            model = split(plain, TENSOR_PARALLEL if layout.tensor > 1 else PIPELINE)
        model.compile(
            keras.optimizers.Adam(1e-3, epsilon=1e-3),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    return model


def main(layout, directory, output):
    """Trains or resumes; then exports the model."""
    model, (x, y) = build(kdist.Layout.parse(layout)), examples()
    slow = keras.callbacks.Callback()
    slow.on_train_batch_end = lambda batch, logs: time.sleep(SECONDS_PER_STEP)
    checkpoint = kdist.callbacks.Checkpoint(directory, every_steps=1)
    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[checkpoint, slow],
    )
    directory = pathlib.Path(output).parent
    model.export(directory / "served", verbose=False)
    model.save(directory / "model.keras")
    np.savez(directory / "weights.npz", *model.get_weights())
    np.savez(directory / "predicted.npz", x=x, y=model.predict(x, verbose=0))
    result = {"from": checkpoint.resumed_from, "steps": int(model.optimizer.iterations.numpy())}
    pathlib.Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
