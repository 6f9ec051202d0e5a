"""Models of keras.applications by name, with new weights or those of ImageNet."""

import contextlib
import inspect
import json
import os
import pathlib
import socket
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any

PREFIX = "keras.applications."

# Values of --weights that are no files.
NEW, IMAGENET = "none", "imagenet"

_EFFICIENT_NETS = tuple(f"EfficientNetB{n}" for n in range(8))
# Those whose first layers scale pixels from 0 to 255.
_SCALE_PIXELS = (
    *("ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtSmall", "ConvNeXtTiny", "ConvNeXtXLarge"),
    *_EFFICIENT_NETS,
    *(f"EfficientNetV2{size}" for size in ("B0", "B1", "B2", "B3", "L", "M", "S")),
    *("MobileNetV3Large", "MobileNetV3Small"),
)
APPLICATIONS = (
    *_SCALE_PIXELS,
    *("DenseNet121", "DenseNet169", "DenseNet201", "InceptionResNetV2", "InceptionV3"),
    *("MobileNet", "MobileNetV2", "NASNetLarge", "NASNetMobile", "ResNet50", "ResNet101"),
    *("ResNet152", "ResNet50V2", "ResNet101V2", "ResNet152V2", "VGG16", "VGG19", "Xception"),
)
_SERVER = "https://storage.googleapis.com/tensorflow/keras-applications/"  # Keras's
# Limit for a server that does not answer.
_ANSWER_SECONDS = 10.0
# The planner's names, such as "resnet50".
_BY_LOWER_NAME = {name.lower(): name for name in APPLICATIONS}


def application(model: str) -> str | None:
    """Returns the name in keras.applications, such as "ResNet50"; None for other models.

    Args:
        model: such as "keras.applications.ResNet50", or "resnet50", as the planner writes it.
    """
    name = model.removeprefix(PREFIX)
    return name if name in APPLICATIONS else _BY_LOWER_NAME.get(name)


def build_application(
    name: str,
    input_shape: Sequence[int],
    num_classes: int,
    precision: str,
    start: str = NEW,
    **arguments: Any,
):
    """Returns a model of keras.applications: pixels from 0 to 255 to class probabilities.

    For new weights it is Keras's model, and pixels are scaled to -1 to 1, except where the model
    scales them itself. For weights of ImageNet, pixels are scaled as these expect them, gray images
    get three equal channels, and the last layer is a new one, "logits".

    Args:
        name: one of `APPLICATIONS`.
        input_shape: (H, W, C) of the images.
        num_classes: number of classes.
        precision: dtype policy.
        start: "none" for new weights, "imagenet" for those that Keras downloads, or the file whose
            weights will be loaded. Defaults to "none".
        **arguments: further arguments of the function in keras.applications.

    Raises:
        ConnectionError: the weights cannot be downloaded.
        ValueError: images are too small, or there are arguments that this function sets itself.
    """
    import keras

    from kdist.models.parts import builder, model, pixels, probabilities

    check_application_arguments(name, arguments)
    create = getattr(keras.applications, name)

    @builder
    def build():
        if not _is_of_imagenet(start):
            rescale = None if name in _SCALE_PIXELS else 1 / 127.5
            inputs, x = pixels(input_shape, rescale, offset=-1.0)
            built = create(
                weights=None,
                input_tensor=x,
                input_shape=tuple(input_shape),
                classes=num_classes,
                classifier_activation=None,
                **arguments,
            )
            layer = keras.layers.Activation("softmax", dtype="float32", name="probabilities")
            return model(inputs, layer(built.output), name.lower())
        inputs, x = pixels(input_shape, None)
        if input_shape[-1] == 1:
            x = keras.layers.Concatenate()([x] * 3)
        built = create(
            weights="imagenet" if start == IMAGENET else None,
            include_top=False,
            input_tensor=_as_on_imagenet(name, x, start),
            input_shape=(*input_shape[:2], x.shape[-1]),
            pooling="avg",
            **arguments,
        )
        return model(inputs, probabilities(built.output, num_classes), name.lower())

    try:
        with _downloads(name):
            return build(precision=precision)
    except ValueError as error:
        if "size must be at least" not in str(error):
            raise
        raise ValueError(
            f"{PREFIX}{name}: images of {tuple(input_shape[:2])} pixels are too small ({error}); "
            "enlarge them: --operations='resize(224, 224)'"
        ) from error


def check_application_arguments(name: str, arguments: Iterable[str]):
    """Raises a ValueError if an argument is one that `build_application` sets itself."""
    fixed = {"weights", "include_top", "input_tensor", "input_shape", "pooling", "classes"}
    if wrong := sorted(fixed.intersection(arguments)):
        raise ValueError(
            f"--model_args={wrong[0]}=…: {PREFIX}{name} is built for the images and classes of the "
            "data, and --weights sets its start weights; for another model write a function, and "
            "pass it as --model=path.py:function"
        )


def check_download(name: str):
    """Checks that Keras can download the weights of a model, or has done so before.

    Raises:
        ConnectionError: the server cannot be reached.
    """
    import urllib.error
    import urllib.request

    folder = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras"), "models").expanduser()
    if any(name.lower() in file.name.replace("_", "").lower() for file in folder.glob("*.h5")):
        return
    request = urllib.request.Request(_SERVER, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_ANSWER_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # the server answers
    except OSError as error:
        raise _no_download(name, error) from error


def _no_download(name, error):
    return ConnectionError(
        f"--weights=imagenet: the weights cannot be downloaded ({error}). Where there is a network"
        f', run python -c "import keras; {PREFIX}{name}(include_top=False)'
        f".save_weights('{name}.weights.h5')\"; copy the file here, and pass "
        f"--weights={name}.weights.h5"
    )


def _is_of_imagenet(start):
    """Returns whether pixels are scaled as for ImageNet.

    They are not for new weights, nor for a file of this program that began with new weights.
    """
    if start == NEW or not start.endswith(".keras"):
        return start != NEW
    with zipfile.ZipFile(start) as archive:
        config = json.loads(archive.read("config.json"))["config"]
    names = {layer.get("config", {}).get("name") for layer in config.get("layers", ())}
    return "pixels" not in names or "logits" in names


def _as_on_imagenet(name, x, start):
    """Returns pixels as the weights of ImageNet expect them."""
    import keras

    if name in _EFFICIENT_NETS and start != IMAGENET:
        # With weights="imagenet", Keras divides again by the root of the standard deviation, after
        # the normalization. The same, before it:
        mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        scale = [each**-0.5 for each in deviation]
        offset = [255 * m * (1 - s) for m, s in zip(mean, scale, strict=True)]
        return keras.layers.Rescaling(scale, offset)(x)
    modules = filter(inspect.ismodule, vars(keras.applications).values())
    return next(module for module in modules if hasattr(module, name)).preprocess_input(x)


@contextlib.contextmanager
def _downloads(name):
    """Returns a context manager that reports weights that cannot be downloaded within seconds."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_ANSWER_SECONDS)
    try:
        yield
    except Exception as error:  # Keras raises no class of its own
        if "URL fetch failure" not in str(error) and not isinstance(error, TimeoutError):
            raise
        raise _no_download(name, error) from error
    finally:
        socket.setdefaulttimeout(before)
