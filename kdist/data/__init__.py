"""Datasets and the input pipelines that feed them to `fit`.

batch = kdist.Batch(local=64, replicas=2)
train, test = kdist.data.load("fashion_mnist", batch=batch, operations="random_flip()")
model.fit(train, validation_data=test)
plain_keras_model.fit(train.dataset(), steps_per_epoch=train.steps_per_epoch)

source = kdist.data.from_arrays(images, labels)       # your own data
train = kdist.data.Pipeline(source, batch)
kdist.data.measure(train).examples_per_second         # upper bound of any training on it
"""

from kdist.public_names import import_on_demand

# Public name -> the module that defines it.
_PUBLIC = {
    "BatchSource": "batches",
    "DatasetUnavailable": "arrays",
    "Pipeline": "pipeline",
    "Source": "arrays",
    "Throughput": "pipeline",
    "from_arrays": "arrays",
    "from_batches": "batches",
    "from_text": "text",
    "load": "datasets",
    "measure": "pipeline",
    "weighted": "pipeline",
}
# Deprecated name -> the public name that replaces it.
_RENAMED = {"weighed": "weighted"}

__all__ = sorted(_PUBLIC)

__getattr__ = import_on_demand(__name__, _PUBLIC, _RENAMED)


def __dir__():
    return __all__
