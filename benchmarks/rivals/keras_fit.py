"""Plain Keras's `fit` under MirroredStrategy, as in TensorFlow's guide.

One step per call: Keras's own step groups fail under MirroredStrategy.
"""

from benchmarks.rivals import workload

if __name__ == "__main__":
    given = workload.read()

    import tensorflow as tf

    from benchmarks.rivals import tensorflow_parts as parts

    strategy = tf.distribute.MirroredStrategy(parts.logical_cpus(given))
    with strategy.scope():
        model = parts.as_keras(parts.new_model(given))
    parts.time_fit(given, model)
