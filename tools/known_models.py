"""Models of published benchmarks that are neither in keras.applications nor in kdist.models.

They are traced as workloads and never trained. Layers have the sizes of the originals; operations
with negligible arithmetic (sampling, losses, decoding of boxes) are omitted.
"""

import keras
from keras import layers

_CLASSES = 1000
_VOCABULARY = 30_522
# Name of a model -> operations of the original that the model here omits.
LEFT_OUT = {"mask_rcnn_r50": ("NonMaxSuppressionV3",)}


def alexnet() -> keras.Model:
    """Returns the one-tower AlexNet on 227×227 images (Krizhevsky 2014, arXiv:1404.5997)."""
    inputs = x = keras.Input((227, 227, 3))
    x = layers.Conv2D(64, 11, 4, activation="relu")(x)
    x = layers.MaxPooling2D(3, 2)(x)
    x = layers.Conv2D(192, 5, padding="same", activation="relu")(x)
    x = layers.MaxPooling2D(3, 2)(x)
    for filters in (384, 256, 256):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D(3, 2)(x))
    for _ in range(2):
        x = layers.Dropout(0.5)(layers.Dense(4096, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(_CLASSES, activation="softmax")(x))


def resnet50_v1_5() -> keras.Model:
    """Returns ResNet-50 with strides in its 3×3 convolutions, as in NVIDIA's examples."""
    return _classifier((224, 224, 3), lambda x: _resnet(x, (3, 4, 6, 3))[-1])


def resnext101_32x4d() -> keras.Model:
    """Returns ResNeXt-101 with 32 groups of 4 channels (Xie et al. 2017, arXiv:1611.05431)."""
    return _classifier((224, 224, 3), lambda x: _resnet(x, (3, 4, 23, 3), 128, groups=32)[-1])


def mask_rcnn_r50() -> keras.Model:
    """Returns Mask R-CNN on ResNet-50-FPN at 1024×1024 (He et al. 2017, arXiv:1703.06870).

    An approximation: 512 regions of 7×7 for the boxes and 128 of 14×14 for the masks are cut as
    adjacent tiles from the finest map, so that the heads are convolutions with the arithmetic of
    the originals. The sampling of regions is omitted. The backbone's normalization layers and its
    first stage are frozen.
    """
    inputs = keras.Input((1024, 1024, 3))
    maps = _resnet(inputs, (3, 4, 6, 3))
    backbone = keras.Model(inputs, maps)
    for layer in backbone.layers:
        norm = isinstance(layer, layers.BatchNormalization)
        layer.trainable = not norm and not layer.name.startswith(("stem", "stage1"))
    pyramid = _pyramid(maps)
    outputs = []
    region, logits, boxes = (
        layers.Conv2D(256, 3, padding="same", activation="relu"),
        layers.Conv2D(3, 1),
        layers.Conv2D(12, 1),
    )
    for level in pyramid:
        y = region(level)
        outputs += [logits(y), boxes(y)]
    cut = layers.Cropping2D(((0, 256 - 14 * 16), (0, 256 - 14 * 8)))(pyramid[0])
    x = layers.Conv2D(1024, 7, 7, activation="relu")(cut)  # 32 × 16 regions of 7 × 7
    x = layers.Conv2D(1024, 1, activation="relu")(x)
    outputs += [layers.Conv2D(91, 1)(x), layers.Conv2D(4 * 91, 1)(x)]
    x = cut  # 16 × 8 regions of 14 × 14
    for _ in range(4):
        x = layers.Conv2D(256, 3, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(256, 2, 2, activation="relu")(x)
    outputs.append(layers.Conv2D(91, 1)(x))
    return keras.Model(inputs, outputs)


def efficientdet_d0() -> keras.Model:
    """Returns EfficientDet-D0 at 512×512 (Tan et al. 2020, arXiv:1911.09070).

    An approximation: EfficientNet-B0, three BiFPN layers of 64 channels with plain instead
    of weighted sums, and two heads of three separable convolutions for 9 anchors per position.
    """
    backbone = keras.applications.EfficientNetB0(
        include_top=False, weights=None, input_shape=(512, 512, 3)
    )
    ends = ("block3b_add", "block5c_add", "block7a_project_bn")
    maps = [layers.Conv2D(64, 1)(backbone.get_layer(name).output) for name in ends]
    for _ in range(2):
        maps.append(layers.MaxPooling2D(3, 2, padding="same")(maps[-1]))
    for _ in range(3):
        maps = _bifpn(maps)
    outputs = []
    for out in (90 * 9, 4 * 9):
        for level in maps:
            x = level
            for _ in range(3):
                x = _separable(x)
            outputs.append(layers.SeparableConv2D(out, 3, padding="same")(x))
    return keras.Model(backbone.input, outputs)


def unet_medical() -> keras.Model:
    """Returns U-Net for two classes on 572×572 images (Ronneberger 2015, arXiv:1505.04597)."""
    inputs = x = keras.Input((572, 572, 1))
    skipped = []
    for filters in (64, 128, 256, 512):
        x = _two_convolutions(x, filters)
        skipped.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = _two_convolutions(x, 1024)
    for filters, skip in zip((512, 256, 128, 64), reversed(skipped), strict=True):
        x = layers.Conv2DTranspose(filters, 2, 2)(x)
        before = (skip.shape[1] - x.shape[1]) // 2
        after = skip.shape[1] - x.shape[1] - before
        skip = layers.Cropping2D(((before, after), (before, after)))(skip)
        x = _two_convolutions(layers.Concatenate()([skip, x]), filters)
    return keras.Model(inputs, layers.Conv2D(2, 1)(x))


def bert_large(length: int, predictions: int | None) -> keras.Model:
    """Returns BERT-large (Devlin et al. 2019, arXiv:1810.04805) on `length` tokens.

    Args:
        length: tokens per sequence.
        predictions: masked tokens per sequence in pre-training, which also predicts the next
            sentence; None for SQuAD's two logits per token.
    """
    tokens, segments = (keras.Input((length,), dtype="int32") for _ in range(2))
    table = layers.ReversibleEmbedding(_VOCABULARY, 1024)
    x = _encoder(_embedded(table, tokens, segments, 1024), 24, 1024, 16, 4096)
    if predictions is None:
        return keras.Model([tokens, segments], layers.Dense(2)(x))
    sentence = layers.Dense(1024, activation="tanh")(x[:, 0])
    words = _words(x, table, predictions, 1024)
    return keras.Model([tokens, segments], [words, layers.Dense(2)(sentence)])


def electra_base(length: int, predictions: int | None) -> keras.Model:
    """Returns ELECTRA-base (Clark et al. 2020, arXiv:2003.10555) on `length` tokens.

    The generator has a third of the discriminator's width and shares its embeddings.

    Args:
        length: tokens per sequence.
        predictions: tokens per sequence that the generator replaces; None for the discriminator
            alone, with SQuAD's two logits per token.
    """
    tokens, segments = (keras.Input((length,), dtype="int32") for _ in range(2))
    table = layers.ReversibleEmbedding(_VOCABULARY, 768)
    embedded = _embedded(table, tokens, segments, 768)
    x = _encoder(embedded, 12, 768, 12, 3072)
    if predictions is None:
        return keras.Model([tokens, segments], layers.Dense(2)(x))
    replaced = layers.Dense(1)(layers.Dense(768, activation="gelu")(x))
    small = _encoder(layers.Dense(256)(embedded), 12, 256, 4, 1024)
    return keras.Model([tokens, segments], [_words(small, table, predictions, 768), replaced])


def _classifier(shape, body):
    inputs = keras.Input(shape)
    x = layers.GlobalAveragePooling2D()(body(inputs))
    return keras.Model(inputs, layers.Dense(_CLASSES, activation="softmax")(x))


def _normed(x, filters, size, strides=1, groups=1, relu=True, name=None):
    x = layers.Conv2D(
        filters, size, strides, "same", groups=groups, use_bias=False, name=f"{name}_conv"
    )(x)
    x = layers.BatchNormalization(name=f"{name}_norm")(x)
    return layers.ReLU(name=f"{name}_relu")(x) if relu else x


def _resnet(x, depths, width=64, groups=1):
    """Returns the outputs of the four stages; `width` is that of the first 3×3 convolutions."""
    x = _normed(x, 64, 7, 2, name="stem")
    x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    stages = []
    for stage, depth in enumerate(depths):
        for block in range(depth):
            name = f"stage{stage + 1}_block{block + 1}"
            strides = 2 if stage and not block else 1
            y = _normed(x, width << stage, 1, name=f"{name}_1")
            y = _normed(y, width << stage, 3, strides, groups, name=f"{name}_2")
            y = _normed(y, 256 << stage, 1, relu=False, name=f"{name}_3")
            if not block:
                x = _normed(x, 256 << stage, 1, strides, relu=False, name=f"{name}_shortcut")
            x = layers.ReLU(name=f"{name}_relu")(layers.Add(name=f"{name}_add")([x, y]))
        stages.append(x)
    return stages


def _pyramid(maps):
    """Returns an FPN (Lin et al. 2017, arXiv:1612.03144): 256 channels at strides 4 to 64."""
    tops = [layers.Conv2D(256, 1)(x) for x in maps]
    for i in reversed(range(len(tops) - 1)):
        tops[i] = layers.Add()([tops[i], layers.UpSampling2D(2)(tops[i + 1])])
    pyramid = [layers.Conv2D(256, 3, padding="same")(x) for x in tops]
    return [*pyramid, layers.MaxPooling2D(1, 2)(pyramid[-1])]


def _separable(x):
    x = layers.SeparableConv2D(64, 3, padding="same")(x)
    return layers.Activation("swish")(layers.BatchNormalization()(x))


def _bifpn(maps):
    """Returns one BiFPN layer, from coarse to fine and back; `maps` start with the finest."""
    down = [maps[-1]]
    for x in reversed(maps[:-1]):
        down.insert(0, _separable(layers.Add()([x, layers.UpSampling2D(2)(down[0])])))
    up = [down[0]]
    for x, middle in zip(maps[1:], down[1:], strict=True):
        finer = layers.MaxPooling2D(3, 2, padding="same")(up[-1])
        up.append(_separable(layers.Add()([x, middle, finer])))
    return up


def _two_convolutions(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, activation="relu")(x)
    return x


def _embedded(table, tokens, segments, width):
    places = keras.ops.arange(tokens.shape[1])
    x = table(tokens) + layers.Embedding(2, width)(segments)
    x = x + layers.Embedding(512, width)(places)
    return layers.Dropout(0.1)(layers.LayerNormalization()(x))


def _encoder(x, depth, width, heads, inner):
    """Returns transformer blocks that normalize after attention and after the dense layers."""
    for _ in range(depth):
        y = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(y))
        y = layers.Dense(width)(layers.Dense(inner, activation="gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(y))
    return x


def _words(x, table, predictions, width):
    """Returns vocabulary logits of the first positions, which represent the masked tokens."""
    x = layers.Dense(width, activation="gelu")(x[:, :predictions])
    return table(layers.LayerNormalization()(x), reverse=True)
