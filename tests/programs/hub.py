"""Programs with KerasHub's tasks, in tiny configurations without presets or preprocessors."""

import keras
import keras_hub
import numpy as np

from tests.programs.program import outcome, program


def _tokens(n=37, length=6, seed=0):
    rng = np.random.default_rng(seed)
    there = np.arange(length) < rng.integers(2, length + 1, (n, 1))
    return np.where(there, rng.integers(1, 20, (n, length)), 0), there.astype("int32")


def _bert():
    return keras_hub.models.BertBackbone(
        vocabulary_size=20,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        dropout=0.0,
        max_sequence_length=6,
    )


@program
def hub_text_classifier():
    """KerasHub's BertTextClassifier with its own compile defaults replaced, saved and loaded."""
    tokens, there = _tokens()
    x = {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": there}
    y = np.random.default_rng(1).integers(0, 2, 37)
    classifier = keras_hub.models.BertTextClassifier(_bert(), 2, preprocessor=None, dropout=0.0)
    classifier.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3),
        metrics=["accuracy"],
    )
    history = classifier.fit(x, y, batch_size=16, epochs=2, verbose=0)
    classifier.backbone.enable_lora(2)
    again = classifier.fit(x, y, batch_size=16, verbose=0).history
    return outcome(history, classifier, again=again, predicted=classifier.predict(x, verbose=0))


@program
def hub_masked_lm():
    """KerasHub's BertMaskedLM: positions of masks are an input, weights of tokens are given."""
    tokens, there = _tokens()
    x = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": there,
        "mask_positions": np.tile([1, 0], (37, 1)),
    }
    model = keras_hub.models.BertMaskedLM(_bert(), preprocessor=None)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3),
        weighted_metrics=["accuracy"],
    )
    weights = np.random.default_rng(1).random((37, 2))
    history = model.fit(x, tokens[:, :2], sample_weight=weights, batch_size=16, verbose=0)
    return outcome(history, model)


@program
def hub_causal_lm():
    """KerasHub's GPT2CausalLM, fine-tuned on token ids with a padding mask."""
    tokens, there = _tokens()
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=20,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        dropout=0.0,
        max_sequence_length=6,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    x = {"token_ids": tokens, "padding_mask": there}
    shifted = np.roll(tokens, -1, 1)
    history = model.fit(x, shifted, sample_weight=there, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


@program(slow=True)
def hub_image_classifier():
    """KerasHub's ViTImageClassifier on a tiny backbone."""
    rng = np.random.default_rng(0)
    x, y = rng.random((34, 8, 8, 3)).astype("float32"), rng.integers(0, 3, 34)
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=8,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    model = keras_hub.models.ViTImageClassifier(backbone, num_classes=3, preprocessor=None)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3),
        metrics=["accuracy"],
    )
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))
