"""A split model's training that a test disturbs, under a layout, to what is served of it.

python trained_split.py LAYOUT DIRECTORY OUTPUT

Checkpoints go to DIRECTORY. When training is through, beside OUTPUT are: `served`, a SavedModel;
`model.keras`; `weights.npz`; and `predicted.npz`, the tokens that were predicted for and what the
trained model said.
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np

import kdist
from kdist.parallel import column, heads, row, split, stage

# A step takes a few milliseconds: the kill is to meet training.
SECONDS_A_STEP = 0.1
ROWS, BATCH, EPOCHS = 160, 16, 3
STEPS = EPOCHS * ROWS // BATCH

DIVIDED = {
    "token_embedding": row(),
    ".*_attention": heads(),
    ".*_up": column(),
    ".*_down": row(),
}
ON_STAGES = {"block1_ffn_norm": stage(1)}


def examples():
    """Tokens (B, T) and classes (B,)."""
    generator = np.random.default_rng(0)
    return generator.integers(0, 20, (ROWS, 6)).astype("int32"), generator.integers(0, 3, ROWS)


def built(layout):
    """The model, in the scope of the layout's strategy, compiled."""
    strategy = kdist.create_strategy(layout)
    keras.utils.set_random_seed(1)
    plain = kdist.models.transformer(
        (6,), 3, vocabulary_size=20, width=16, heads=4, depth=1, dropout=0.0
    )
    with strategy.scope():
        if layout.group_size == 1:
            model = kdist.Model.of(plain)
        else:
            model = split(plain, DIVIDED if layout.tensor > 1 else ON_STAGES)
        model.compile(
            keras.optimizers.Adam(1e-3, epsilon=1e-3),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    return model


def main(layout, directory, output):
    """Trains, or goes on; then writes what is served."""
    model, (x, y) = built(kdist.Layout.parse(layout)), examples()
    slow = keras.callbacks.Callback()
    slow.on_train_batch_end = lambda batch, logs: time.sleep(SECONDS_A_STEP)
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
    here = pathlib.Path(output).parent
    model.export(here / "served", verbose=False)
    model.save(here / "model.keras")
    np.savez(here / "weights.npz", *model.get_weights())
    np.savez(here / "predicted.npz", x=x, y=model.predict(x, verbose=0))
    result = {"from": checkpoint.resumed_from, "steps": int(model.optimizer.iterations.numpy())}
    pathlib.Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
