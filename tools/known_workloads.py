"""Rebuilds the workloads of known models in kdist/planner/workload.

  python tools/known_workloads.py                          # all, about ten minutes
  python tools/known_workloads.py --only=resnet50,lenet
  python tools/known_workloads.py --output_dir=/tmp/there  # instead of into kdist

Each model is built without weights, and one training step of it is traced but never run. The files
are reproducible for the same versions of TensorFlow, Keras, and kdist.
"""

import dataclasses
import functools
import gzip
import inspect
import json
import pathlib
import time

import keras
from absl import flags

import kdist
import known_models
from kdist import program
from kdist.planner import read_workload
from kdist.planner.workload import layers

FLAGS = flags.FLAGS

with program.flag_group("Workloads"):
    flags.DEFINE_list("only", None, "Names of the models to rebuild; all by default.")
    flags.DEFINE_string(
        "output_dir",
        str(layers.WORKLOADS_DIRECTORY),
        "Directory of the files NAME.json.gz; kdist's own directory by default.",
    )

FASHION_MNIST = {"input_shape": (28, 28, 1), "num_classes": 10}
CIFAR10 = {"input_shape": (32, 32, 3), "num_classes": 10}


def builders():
    """Returns {name of a known model: function without arguments that builds it}."""
    found = {
        name.lower(): functools.partial(builder, weights=None)
        for name, builder in vars(keras.applications).items()
        if inspect.isfunction(builder)
    }
    small = ("mlp", "lenet", "resnet18", "inception")
    for name in small:
        found[name] = functools.partial(kdist.models.create, name, **FASHION_MNIST)
        found[f"{name}_cifar10"] = functools.partial(kdist.models.create, name, **CIFAR10)
    found["transformer"] = functools.partial(
        kdist.models.transformer, input_shape=(128,), num_classes=2
    )
    found["mobilenetv2_fine_tune"] = functools.partial(kdist.models.mobilenet_v2)
    for model in (
        known_models.alexnet,
        known_models.resnet50_v1_5,
        known_models.resnext101_32x4d,
        known_models.mask_rcnn_r50,
        known_models.efficientdet_d0,
        known_models.unet_medical,
    ):
        found[model.__name__] = model
    for length, predictions in ((128, 20), (384, None), (512, 80)):
        for model in (known_models.bert_large, known_models.electra_base):
            found[f"{model.__name__}_seq{length}"] = functools.partial(model, length, predictions)
    return found


def main(_):
    found = builders()
    unknown = set(FLAGS.only or ()) - found.keys()
    if unknown:
        raise ValueError(
            f"--only={','.join(sorted(unknown))} is unknown; choose from {', '.join(sorted(found))}"
        )
    directory = pathlib.Path(FLAGS.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    for name in FLAGS.only or sorted(found):
        start = time.perf_counter()
        size = write(name, found[name], directory)
        seconds = time.perf_counter() - start
        print(f"{name:24} {size:8,} bytes {seconds:6.1f} s", flush=True)


def write(name, build, directory):
    """Builds one model, writes its workload, and returns the size of the file in bytes."""
    keras.utils.clear_session()  # layer numbers start from the first one
    model = build()
    # MobileNetV3 accepts images of any size by default.
    work = read_workload(model, (224, 224, 3) if None in model.inputs[0].shape[1:] else None)
    left_out = known_models.LEFT_OUT.get(name, ())
    work = dataclasses.replace(work, name=name, uncounted=(*work.uncounted, *left_out))
    text = json.dumps(json.loads(work.to_json()), separators=(",", ":"))
    # Without a timestamp, the same workload gives the same file.
    content = gzip.compress(text.encode(), mtime=0)
    (directory / f"{name}.json.gz").write_bytes(content)
    return len(content)


if __name__ == "__main__":
    program.run(main)
