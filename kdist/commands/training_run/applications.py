"""Models of keras.applications by name, for training from their initial weights."""

from collections.abc import Sequence
from typing import Any

PREFIX = "keras.applications."

# Those whose first layers scale pixels from 0 to 255.
_SCALE_PIXELS = (
    *("ConvNeXtBase", "ConvNeXtLarge", "ConvNeXtSmall", "ConvNeXtTiny", "ConvNeXtXLarge"),
    *(f"EfficientNetB{n}" for n in range(8)),
    *(f"EfficientNetV2{size}" for size in ("B0", "B1", "B2", "B3", "L", "M", "S")),
    *("MobileNetV3Large", "MobileNetV3Small"),
)
APPLICATIONS = (
    *_SCALE_PIXELS,
    *("DenseNet121", "DenseNet169", "DenseNet201", "InceptionResNetV2", "InceptionV3"),
    *("MobileNet", "MobileNetV2", "NASNetLarge", "NASNetMobile", "ResNet50", "ResNet101"),
    *("ResNet152", "ResNet50V2", "ResNet101V2", "ResNet152V2", "VGG16", "VGG19", "Xception"),
)
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
    name: str, input_shape: Sequence[int], num_classes: int, precision: str, **arguments: Any
):
    """Returns a model of keras.applications with new weights: pixels to class probabilities.

    Pixels from 0 to 255 are scaled to -1 to 1, except where the model scales them itself.

    Args:
        name: one of `APPLICATIONS`.
        input_shape: (H, W, C) of the images.
        num_classes: number of classes.
        precision: dtype policy.
        **arguments: further arguments of the function in keras.applications.

    Raises:
        ValueError: images are too small, or there are arguments that this function sets itself.
    """
    import keras

    from kdist.models.parts import builder, model, pixels

    fixed = {"weights", "include_top", "input_tensor", "input_shape", "pooling", "classes"}
    if wrong := sorted(fixed & arguments.keys()):
        raise ValueError(
            f"--model_args={wrong[0]}=…: {PREFIX}{name} is trained from its initial weights, for "
            "the images and classes of the data; for another model write a function, and pass it "
            "as --model=path.py:function"
        )

    @builder
    def build():
        rescale = None if name in _SCALE_PIXELS else 1 / 127.5
        inputs, x = pixels(input_shape, rescale, offset=-1.0)
        built = getattr(keras.applications, name)(
            weights=None,
            input_tensor=x,
            input_shape=tuple(input_shape),
            classes=num_classes,
            classifier_activation=None,
            **arguments,
        )
        logits = built.output
        outputs = keras.layers.Activation("softmax", dtype="float32", name="probabilities")(logits)
        return model(inputs, outputs, name.lower())

    return build(precision=precision)
