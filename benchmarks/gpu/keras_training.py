"""Times `fit` of kdist, of plain Keras, and of Keras on JAX.

  python -m benchmarks.gpu.keras_training '{"library": "kdist", "model": "resnet50"}'

Every variant prints a row when it is measured. Variants share one process, which starts the GPU
once.
"""

import contextlib
import gc
import os
import tempfile
import time

from benchmarks.gpu import spec

if __name__ == "__main__":
    task = spec.read_task()
    os.environ["KERAS_BACKEND"] = "jax" if task.library == "jax" else "tensorflow"
    # TensorFlow creates the input of JAX, and each would otherwise reserve most of the memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"

import keras
import numpy as np

_POLICIES = {"float32": "float32", "tf32": "float32", "bfloat16": "mixed_bfloat16"}
_WARM_UP_STEPS = 20


def build(name: str, size: spec.Size) -> keras.Model:
    """Returns the named network as a plain Keras model."""
    applications = {"resnet50": "ResNet50", "mobilenet_v2": "MobileNetV2"}
    if name in applications:
        application = getattr(keras.applications, applications[name])
        return application(weights=None, input_shape=tuple(size.shape), classes=size.classes)
    layers = keras.layers
    inputs = keras.Input(size.shape, dtype="int32" if name == "transformer" else "float32")
    if name == "pooling":
        x = layers.GlobalAveragePooling2D()(inputs)
        return keras.Model(inputs, layers.Dense(size.classes, "softmax", dtype="float32")(x))
    if name == "transformer":
        x = layers.Embedding(size.vocabulary, size.width)(inputs)
    else:
        x = layers.Conv2D(size.width, size.patch, strides=size.patch)(inputs)
        x = layers.Reshape((-1, size.width))(x)
    positions = layers.Embedding(x.shape[1], size.width)
    x = x + positions(np.arange(x.shape[1])[None])
    for _ in range(size.depth):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(size.heads, size.width // size.heads)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(size.width)(layers.Dense(4 * size.width, "gelu")(y))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(size.classes, "softmax", dtype="float32")(x))


def main(task: spec.Task):
    """Prints a row for each variant of the task, or the kernels of one."""
    for variant in task.variants:
        try:
            _measure(task, variant)
        except Exception as error:  # Such as memory that is exhausted: later variants still run.
            spec.print_failure(task, variant, error)
        _release_memory(task)


def _measure(task, variant):
    _set_precision(task.library, variant.precision)
    size = task.size
    model = build(task.model, size)
    predicted = _predictions(task, variant, model) if task.library == "kdist" else {}
    if task.library == "kdist":
        import kdist

        model = kdist.Model.of(model)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        "sparse_categorical_crossentropy",
        jit_compile=variant.compiled,
        steps_per_execution=variant.steps_per_call,
    )
    if task.profile:
        _print_profile(task, variant, model, _batches(task, variant))
        return
    with _telemetry(variant) as callbacks:
        milliseconds, first = _time(task, variant, model, callbacks)
    spec.print_training(
        task, variant, milliseconds, first_seconds=first, **predicted, **_peak_memory(task)
    )


def _set_precision(library, precision):
    keras.config.set_dtype_policy(_POLICIES[precision])
    if library == "jax":
        import jax

        name = "tensorfloat32" if precision == "tf32" else "float32"
        jax.config.update("jax_default_matmul_precision", name)
        return
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(precision != "float32")


def _batches(task, variant):
    """Returns an endless dataset. Batches repeat, or each reads and changes JPEG images."""
    import tensorflow as tf

    size, generator = task.size, np.random.default_rng(0)
    if variant.reads:
        return _read_images(tf, size, generator).prefetch(tf.data.AUTOTUNE)
    shape = (size.batch, *size.shape)
    labels = generator.integers(0, size.classes, size.batch).astype("int32")
    if len(size.shape) == 1:
        values = generator.integers(0, size.vocabulary, shape).astype("int32")
    else:
        values = generator.random(shape, "float32")
    batches = tf.data.Dataset.from_tensors((values, labels)).repeat()
    return _prefetched(tf, batches) if variant.prefetches else batches.prefetch(2)


def _prefetched(tf, batches):
    """Returns a dataset whose next batch is copied to the GPU during a step.

    Copies from page-locked memory do not wait for the step. Of the operations of `tf.data`, only
    `map_and_batch` allocates it: it makes a batch of one batch, whose first axis is then removed.
    """
    locked = tf.data.experimental.map_and_batch(lambda *batch: batch, 1, num_parallel_calls=1)
    batches = batches.apply(locked).map(lambda *batch: [tf.squeeze(each, 0) for each in batch])
    device = "/GPU:0" if _gpu_name() else "/CPU:0"
    return batches.apply(tf.data.experimental.prefetch_to_device(device, 1))


def _read_images(tf, size, generator):
    height, width, _ = size.shape
    # Some 256 × 256 pixels, as in prepared copies of ImageNet.
    larger = (height * 8 // 7, width * 8 // 7, 3)
    images = generator.integers(0, 256, (64, *larger)).astype("uint8")
    files = [tf.io.encode_jpeg(image).numpy() for image in images]

    def read(content):
        image = tf.image.random_crop(tf.io.decode_jpeg(content, 3), size.shape)
        image = tf.cast(tf.image.random_flip_left_right(image), "float32") / 255
        return image, tf.zeros([], "int32")

    data = tf.data.Dataset.from_tensor_slices(files).repeat()
    return data.map(read, tf.data.AUTOTUNE).batch(size.batch, drop_remainder=True)


@contextlib.contextmanager
def _telemetry(variant):
    if not variant.telemetry:
        yield []
        return
    import kdist
    from kdist.run_directory import RunDirectory

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        yield [kdist.callbacks.Telemetry(RunDirectory(directory))]


def _time(task, variant, model, callbacks):
    """Returns milliseconds per step and the seconds of the first call.

    JAX and TensorFlow compute asynchronously. The clock stops when `fit` has read the last loss.
    """
    data, calls = _batches(task, variant), variant.steps_per_call
    if task.library == "jax":
        data = list(data.take(1).as_numpy_iterator())  # The batch stays on the host, as elsewhere.

    def fit(steps):
        steps = -(-steps // calls) * calls
        source = _repeat(data[0]) if task.library == "jax" else data
        began = time.perf_counter()
        model.fit(source, steps_per_epoch=steps, verbose=0, callbacks=callbacks, shuffle=False)
        return time.perf_counter() - began, steps

    first, _ = fit(1)
    fit(_WARM_UP_STEPS // (10 if task.tiny else 1))
    seconds, steps = fit(_WARM_UP_STEPS // (10 if task.tiny else 1))
    seconds, steps = fit(max(2, int(task.seconds * steps / seconds)))
    return seconds / steps * 1e3, first


def _repeat(batch):
    while True:
        yield batch


def _predictions(task, variant, model):
    """Returns the FLOPs of a step, and the planner's memory and time for this GPU."""
    from kdist.planner import find_gpu, read_workload
    from kdist.planner.cost.compute import compute_seconds
    from kdist.planner.cost.memory import estimate_memory

    batch, policy = task.size.batch, _POLICIES[variant.precision]
    kind = "gpu" if _gpu_name() else "cpu"
    workload = read_workload(model)
    memory = estimate_memory(workload, batch, policy, "momentum", framework_bytes=0, device=kind)
    found = {"flops": workload.training_flops * batch, "predicted_bytes": memory.total}
    gpu = find_gpu(_gpu_name() or "H100 80GB SXM")  # On the CPU only so that the path is run.
    if gpu and variant.precision != "float32":  # The planner counts on TF32.
        seconds = compute_seconds(workload, gpu, batch, policy, variant.compiled).seconds
        found["predicted_ms"] = seconds * 1e3
    return found


def _gpu_name():
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(gpus[0]).get("device_name") if gpus else None


def _peak_memory(task):
    """Returns the peak of TensorFlow's allocator in this row."""
    if task.library == "jax" or not _gpu_name():
        return {}
    import tensorflow as tf

    return {"peak_bytes": tf.config.experimental.get_memory_info("GPU:0")["peak"]}


def _release_memory(task):
    """Frees the memory of the last row, so that the next peak is that of one model."""
    keras.utils.clear_session()
    gc.collect()  # Functions and models refer to each other.
    if task.library != "jax" and _gpu_name():
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats("GPU:0")


def _print_profile(task, variant, model, data):
    from benchmarks.rivals import operations

    steps = 2 if task.tiny else 10
    model.fit(data, steps_per_epoch=steps, verbose=0)
    found = operations.kernels_during(lambda: model.fit(data, steps_per_epoch=steps, verbose=0))
    total = sum(milliseconds for _, _, milliseconds in found) or 1.0
    for name, calls, milliseconds in found[:20]:
        spec.print_row(
            profile=f"{task.library}, {task.model}, {variant}",
            kernel=name[:100],
            calls_per_step=calls / steps,
            ms_per_step=milliseconds / steps,
            share=milliseconds / total,
        )


if __name__ == "__main__":
    main(task)
