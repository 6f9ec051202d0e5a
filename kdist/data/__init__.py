"""Data sets and the pipelines that feed them to `fit`.

batch = kdist.Batch(local=64, replicas=2)
train, test = kdist.data.load("fashion_mnist", batch=batch, operations="random_flip()")
model.fit(train, validation_data=test)
plain_keras_model.fit(train.dataset(), steps_per_epoch=train.steps_per_epoch)

source = kdist.data.from_arrays(images, labels)      # data of one's own
train = kdist.data.Pipeline(source, batch)
kdist.data.measure(train).examples_per_second         # the most that it can feed
"""

from kdist.data.arrays import from_arrays
from kdist.data.load import load
from kdist.data.pipeline import Pipeline
from kdist.data.source import DatasetUnavailable, Source
from kdist.data.throughput import Throughput, measure
from kdist.data.weighed import weighed

__all__ = [
    "DatasetUnavailable",
    "Pipeline",
    "Source",
    "Throughput",
    "from_arrays",
    "load",
    "measure",
    "weighed",
]
