"""Copies of runs in object storage, such as gs://bucket/runs/a or s3://bucket/runs/a.

    with kdist.mirror.Mirror("gs://bucket/runs/a", "runs/a") as mirror:
        checkpoint = kdist.callbacks.Checkpoint("runs/a/checkpoints", mirror=mirror)
        model.fit(train, epochs=3, callbacks=[checkpoint])

    directory = kdist.mirror.cached("gs://bucket/pets")  # a local copy of data

A run is written to a local directory and copied from there in the background. `kdist train
--mirror` does the same.
"""

from kdist.public_names import import_on_demand

# Public name -> the module that defines it.
_PUBLIC = {
    "Mirror": "mirror",
    "MirroredCheckpoint": "mirror",
    "Store": "store",
    "cached": "cache",
}

__all__ = sorted(_PUBLIC)

__getattr__ = import_on_demand(__name__, _PUBLIC)


def __dir__():
    return __all__
