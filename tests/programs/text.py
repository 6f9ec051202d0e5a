"""Programs about text and speech: classification, tagging, language models, translation, CTC."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import MASKED_MEAN, outcome, program


def _sentences(n, length=6, words=20, seed=0):
    """Sentences of different lengths; 0 is padding."""
    rng = np.random.default_rng(seed)
    x = rng.integers(1, words, (n, length))
    return np.where(np.arange(length) < rng.integers(1, length + 1, (n, 1)), x, 0)


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        positions = ops.arange(start=0, stop=ops.shape(x)[-1], step=1)
        return self.token_emb(x) + self.pos_emb(positions)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, causal=False):
        super().__init__()
        self.causal = causal
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        attended = self.att(inputs, inputs, use_causal_mask=self.causal)
        out1 = self.layernorm1(inputs + attended)
        return self.layernorm2(out1 + self.ffn(out1))


@program(slow=True)
def transformer_classifier():
    """Text classification with a transformer and an embedding of positions, under Adam."""
    x, y = _sentences(45), np.random.default_rng(1).integers(0, 2, 45)
    inputs = layers.Input(shape=(6,))
    z = TransformerBlock(8, 2, 8)(TokenAndPositionEmbedding(6, 20, 8)(inputs))
    z = layers.Dense(6, activation="relu")(layers.GlobalAveragePooling1D()(z))
    model = keras.Model(inputs=inputs, outputs=layers.Dense(2, activation="softmax")(z))
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:9], y[:9]), verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


@program(slow=True)
def bidirectional_lstm():
    """Sentiment with an embedding that masks padding and two bidirectional LSTMs."""
    x, y = _sentences(41), np.random.default_rng(1).integers(0, 2, 41)
    inputs = keras.Input(shape=(None,), dtype="int32")
    z = layers.Embedding(20, 6, mask_zero=True)(inputs)
    z = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(z)
    z = layers.Bidirectional(layers.LSTM(4))(z)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(z))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


@program(slow=True)
def text_vectorization():
    """Raw strings: an adapted TextVectorization in the input pipeline, then an end-to-end model."""
    rng = np.random.default_rng(0)
    vocabulary = np.array(["good", "bad", "film", "the", "a", "was", "plot", "long"])
    texts = np.array([" ".join(rng.choice(vocabulary, rng.integers(1, 7))) for _ in range(39)])
    y = rng.integers(0, 2, 39).astype("float32")
    vectorize = layers.TextVectorization(
        max_tokens=9, output_mode="int", output_sequence_length=5, standardize="lower"
    )
    vectorize.adapt(texts)
    raw = tf.data.Dataset.from_tensor_slices((texts, y)).batch(16)
    data = raw.map(lambda text, label: (vectorize(tf.expand_dims(text, -1)), label)).cache()
    inputs = keras.Input(shape=(None,), dtype="int64")
    z = layers.Embedding(9, 6)(inputs)
    z = layers.Conv1D(6, 3, padding="valid", activation="relu", strides=1)(z)
    z = layers.GlobalMaxPooling1D()(z)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid", name="predictions")(z))
    model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
    history = model.fit(data, validation_data=data, epochs=2, verbose=0)
    text_inputs = keras.Input(shape=(1,), dtype="string")
    end_to_end = keras.Model(text_inputs, model(vectorize(text_inputs)))
    end_to_end.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
    score = end_to_end.evaluate(raw, verbose=0)
    return outcome(history, model, score=score)


class MaskedLanguageModel(keras.Model):
    """BERT-like: predicts masked tokens; the data have weights for masked positions."""

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.token_loss = keras.losses.SparseCategoricalCrossentropy(reduction=None)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def train_step(self, inputs):
        features, labels, sample_weight = inputs
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = self.token_loss(labels, predictions, sample_weight=sample_weight)
            loss = ops.mean(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


@program(slow=True)
def masked_language_model():
    """Masked language model: class with functional inputs, own step, weights; then a classifier."""
    tokens = _sentences(42, words=18)
    hidden = (np.random.default_rng(2).random(tokens.shape) < 0.3) & (tokens > 0)
    masked = np.where(hidden, 19, tokens)
    inputs = keras.Input((6,), dtype="int64")
    z = layers.Embedding(20, 8, name="words")(inputs)
    z = z + layers.Embedding(6, 8, name="positions")(ops.arange(6))
    attention = layers.MultiHeadAttention(2, 4, name="attention")(z, z, z)
    z = layers.LayerNormalization(name="encoded")(z + attention)
    model = MaskedLanguageModel(inputs, layers.Dense(20, activation="softmax")(z))
    model.compile(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3))
    data = (masked, tokens, hidden.astype("float32"))
    data = tf.data.Dataset.from_tensor_slices(data).shuffle(50, seed=3).batch(16)
    history = model.fit(data, epochs=2, verbose=0)
    model.save("bert.keras")
    loaded = keras.models.load_model(
        "bert.keras", custom_objects={"MaskedLanguageModel": MaskedLanguageModel}, compile=False
    )
    encoder = keras.Model(loaded.input, loaded.get_layer("encoded").output)
    encoder.trainable = False
    pooled = layers.GlobalMaxPooling1D()(encoder(inputs))
    classifier = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(pooled))
    classifier.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    tuned = classifier.fit(tokens, tokens[:, 0] % 2, batch_size=16, verbose=0).history
    return outcome(history, model, classifier, tuned=tuned)


class TextGenerator(keras.callbacks.Callback):
    """Continues a prompt greedily after each epoch."""

    def __init__(self, prompt):
        super().__init__()
        self.prompt, self.generated = prompt, []

    def on_epoch_end(self, epoch, logs=None):
        tokens = list(self.prompt)
        for _ in range(2):
            x = np.array([tokens + [0] * (6 - len(tokens))])
            y = self.model.predict(x, verbose=0)
            tokens.append(int(np.argmax(y[0][0][len(tokens) - 1])))
        self.generated.append(tokens)


@program(slow=True)
def miniature_gpt():
    """Causal transformer with two outputs, a loss for one, and a callback that generates."""
    tokens = np.random.default_rng(0).integers(1, 20, (34, 7))
    inputs = layers.Input(shape=(6,), dtype="int32")
    z = TransformerBlock(8, 2, 8, causal=True)(TokenAndPositionEmbedding(6, 20, 8)(inputs))
    model = keras.Model(inputs=inputs, outputs=[layers.Dense(20)(z), z])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss=[loss, None])
    data = tf.data.Dataset.from_tensor_slices(tokens).batch(16)
    data = data.map(lambda tokens: (tokens[:, :-1], tokens[:, 1:])).prefetch(2)
    callback = TextGenerator([3, 1])
    history = model.fit(data, epochs=2, callbacks=[callback], verbose=0)
    return outcome(history, model, generated=callback.generated)


@program(slow=True)
def character_seq2seq():
    """Sequence-to-sequence LSTM with teacher forcing, saved, then cut into inference models."""
    rng = np.random.default_rng(0)
    source, target = np.eye(5)[rng.integers(0, 5, (37, 4))], np.eye(6)[rng.integers(0, 6, (37, 5))]
    shifted = np.concatenate([target[:, 1:], np.zeros((37, 1, 6))], 1)
    encoder_inputs = keras.Input(shape=(None, 5))
    _, state_h, state_c = layers.LSTM(6, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input(shape=(None, 6))
    lstm = layers.LSTM(6, return_sequences=True, return_state=True, name="decoder")
    z, _, _ = lstm(decoder_inputs, initial_state=[state_h, state_c])
    model = keras.Model(
        [encoder_inputs, decoder_inputs], layers.Dense(6, activation="softmax", name="out")(z)
    )
    model.compile("rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        [source, target], shifted, batch_size=16, epochs=2, validation_split=0.2, verbose=0
    )
    model.save("s2s_model.keras")
    model = keras.models.load_model("s2s_model.keras")
    encoder = keras.Model(model.input[0], list(model.layers[2].output[1:]))
    return outcome(
        history, model, states=encoder.predict(source[:3], verbose=0),
        predicted=model.predict([source, target], verbose=0),
    )  # fmt: skip


class Translator(keras.Model):
    """Encoder and decoder transformer on a dict of two sentences."""

    def __init__(self, words=20, dim=8):
        super().__init__()
        self.source = layers.Embedding(words, dim, mask_zero=True)
        self.target = layers.Embedding(words, dim, mask_zero=True)
        self.positions = layers.Embedding(6, dim)
        self.encode = layers.MultiHeadAttention(2, dim)
        self.decode = layers.MultiHeadAttention(2, dim)
        self.attend = layers.MultiHeadAttention(2, dim)
        self.norms = [layers.LayerNormalization() for _ in range(3)]
        self.final = layers.Dense(words)

    def call(self, inputs):
        position = self.positions(ops.arange(6))
        source, target = self.source(inputs["source"]), self.target(inputs["target"])
        there = ops.expand_dims(ops.not_equal(inputs["source"], 0), 1)
        source, target = source + position, target + position
        source = self.norms[0](source + self.encode(source, source, attention_mask=there))
        target = self.norms[1](target + self.decode(target, target, use_causal_mask=True))
        target = self.norms[2](target + self.attend(target, source, attention_mask=there))
        return self.final(target)


def masked_loss(label, pred):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    mask = ops.cast(label != 0, "float32")
    return ops.sum(loss(label, pred) * mask) / ops.maximum(ops.sum(mask), 1.0)


def masked_accuracy(label, pred):
    match = ops.cast(ops.equal(label, ops.argmax(pred, axis=2)), "float32")
    mask = ops.cast(label != 0, "float32")
    return ops.sum(match * mask) / ops.maximum(ops.sum(mask), 1.0)


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, d_model, warmup_steps=4):
        self.d_model, self.warmup_steps = d_model, warmup_steps

    def __call__(self, step):
        step = ops.cast(step, "float32") + 1
        rate = ops.minimum(ops.rsqrt(step), step * self.warmup_steps**-1.5)
        return self.d_model**-0.5 * rate * 0.1

    def get_config(self):
        return {"d_model": self.d_model, "warmup_steps": self.warmup_steps}


@program(slow=True, differs=MASKED_MEAN)
def transformer_translation():
    """Translation with a dict input, teacher forcing, own schedule, and a loss over all words."""
    source, target = _sentences(40), _sentences(40, seed=1)
    model = Translator()
    optimizer = keras.optimizers.Adam(WarmUp(8), beta_1=0.9, beta_2=0.98, epsilon=1e-3)
    model.compile(loss=masked_loss, optimizer=optimizer, metrics=[masked_accuracy])
    shifted = np.pad(target[:, 1:], ((0, 0), (0, 1)))
    history = model.fit(
        {"source": source, "target": target}, shifted, batch_size=16, epochs=2, verbose=0
    )
    return outcome(history, model)


@program(slow=True, differs=MASKED_MEAN)
def masked_translation():
    """Translation where masks of embeddings weight the compiled loss and the metrics."""
    source, target = _sentences(40), _sentences(40, seed=1)
    inputs = {name: keras.Input((None,), name=name) for name in ("source", "target")}
    _, state = layers.GRU(6, return_state=True)(
        layers.Embedding(20, 6, mask_zero=True)(inputs["source"])
    )
    z = layers.Embedding(20, 6, mask_zero=True)(inputs["target"])
    z = layers.GRU(6, return_sequences=True)(z, initial_state=state)
    model = keras.Model(inputs, layers.Dense(20)(z))
    model.compile(
        keras.optimizers.SGD(0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    shifted = np.pad(target[:, 1:], ((0, 0), (0, 1)))
    history = model.fit(
        {"source": source, "target": target}, shifted, batch_size=16, epochs=2, verbose=0
    )
    return outcome(history, model)


@program(slow=True)
def addition():
    """Learns to add: RepeatVector, TimeDistributed, a loop of fits of one epoch each."""
    rng = np.random.default_rng(0)
    x, y = np.eye(12)[rng.integers(0, 12, (36, 5))], np.eye(12)[rng.integers(0, 12, (36, 3))]
    model = keras.Sequential()
    model.add(layers.Input((5, 12)))
    model.add(layers.LSTM(6))
    model.add(layers.RepeatVector(3))
    model.add(layers.LSTM(6, return_sequences=True))
    model.add(layers.TimeDistributed(layers.Dense(12, activation="softmax")))
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    logs, guesses = [], []
    for _ in range(3):
        fitted = model.fit(x, y, batch_size=16, epochs=1, validation_data=(x, y), verbose=0)
        logs.append(fitted.history)
        guesses.append(model.predict(x[:1], verbose=0))
    return outcome(logs, model, guesses=guesses)


class NonPaddingTokenLoss(keras.losses.Loss):
    def __init__(self, name="non_padding"):
        super().__init__(name=name)

    def call(self, y_true, y_pred):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
        loss = loss_fn(y_true, y_pred)
        mask = ops.cast(y_true > 0, dtype="float32")
        return ops.sum(loss * mask, axis=-1) / ops.maximum(ops.sum(mask, axis=-1), 1.0)


class Tagger(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = TokenAndPositionEmbedding(6, 20, 8)
        self.block = TransformerBlock(8, 2, 8)
        self.head = layers.Dense(5, activation="softmax")

    def call(self, x):
        return self.head(self.block(self.embedding(x)))


@program(slow=True)
def named_entities():
    """Tagging with a subclassed model and a loss class that leaves out padding per sentence."""
    x = _sentences(39)
    model = Tagger()
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss=NonPaddingTokenLoss())
    tags = np.where(x > 0, x % 4 + 1, 0)
    data = tf.data.Dataset.from_tensor_slices((x, tags)).batch(16)
    history = model.fit(data, epochs=2, verbose=0)
    model.save_weights("tagger.weights.h5")
    return outcome(history, model, predicted=model.predict(x, verbose=0))


class CTCLayer(layers.Layer):
    """Adds the CTC loss of each batch to the model's losses."""

    def call(self, y_true, y_pred):
        n = ops.shape(y_true)[0]
        lengths = [ops.full((n,), ops.shape(y)[1], dtype="int32") for y in (y_true, y_pred)]
        loss = ops.ctc_loss(ops.cast(y_true, "int32"), y_pred, *lengths, mask_index=0)
        self.add_loss(ops.mean(loss))
        return y_pred


@program(slow=True)
def captcha_ctc():
    """Captcha reader: labels are an input, a layer adds the CTC loss, compile has no loss."""
    rng = np.random.default_rng(0)
    x = rng.random((34, 6, 5)).astype("float32")
    labels = rng.integers(1, 6, (34, 3)).astype("float32")
    images, targets = keras.Input((6, 5), name="image"), keras.Input((3,), name="label")
    z = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(images)
    z = layers.Dense(7, name="dense")(z)
    model = keras.Model([images, targets], CTCLayer(name="ctc_loss")(targets, z))
    model.compile(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3))
    data = tf.data.Dataset.from_tensor_slices({"image": x, "label": labels}).batch(16)
    history = model.fit(data, validation_data=data.take(1), epochs=2, verbose=0)
    reader = keras.Model(model.input[0], model.get_layer(name="dense").output)
    return outcome(history, model, read=reader.predict(x, verbose=0))


@program(slow=True)
def speech_ctc():
    """Speech recognition: spectrograms of the pipeline, GRUs, keras.losses.CTC, a CER callback."""
    rng = np.random.default_rng(0)
    sound = rng.normal(size=(30, 64)).astype("float32")
    labels = rng.integers(1, 5, (30, 3))

    def spectrogram(sound, label):
        found = tf.abs(tf.signal.stft(sound, frame_length=16, frame_step=8, fft_length=16))
        return tf.math.pow(found, 0.5), label

    data = tf.data.Dataset.from_tensor_slices((sound, labels))
    data = data.map(spectrogram).padded_batch(12).prefetch(2)
    inputs = keras.Input((None, 9))
    z = layers.Reshape((-1, 9, 1))(inputs)
    z = layers.Conv2D(3, (3, 3), strides=(1, 2), padding="same", activation="relu")(z)
    z = layers.Reshape((-1, z.shape[-2] * z.shape[-1]))(z)
    z = layers.Bidirectional(layers.GRU(5, return_sequences=True), merge_mode="concat")(z)
    model = keras.Model(inputs, layers.Dense(6)(z))
    model.compile(keras.optimizers.SGD(0.01), loss=keras.losses.CTC())
    decoded = []

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for batch, _ in data:
                decoded.append(self.model.predict(batch, verbose=0))

    history = model.fit(data, validation_data=data, epochs=2, callbacks=[Evaluate()], verbose=0)
    return outcome(history, model, decoded=decoded)


class SpeechTransformer(keras.Model):
    """Takes a dict of source and target; the step shifts the target."""

    def __init__(self):
        super().__init__()
        self.loss_metric = keras.metrics.Mean(name="loss")
        self.listen = layers.Conv1D(8, 3, strides=2, padding="same", activation="relu")
        self.words, self.positions = layers.Embedding(9, 8), layers.Embedding(5, 8)
        self.attend = layers.MultiHeadAttention(2, 8)
        self.classifier = layers.Dense(9)

    def call(self, inputs):
        source, target = inputs
        z = self.words(target) + self.positions(ops.arange(ops.shape(target)[1]))
        return self.classifier(z + self.attend(z, self.listen(source)))

    @property
    def metrics(self):
        return [self.loss_metric]

    def train_step(self, batch):
        source, target = batch["source"], batch["target"]
        dec_input, dec_target = target[:, :-1], target[:, 1:]
        with tf.GradientTape() as tape:
            preds = self([source, dec_input])
            one_hot = ops.one_hot(dec_target, num_classes=9)
            mask = ops.logical_not(ops.equal(dec_target, 0))
            loss = self.compute_loss(None, one_hot, preds, sample_weight=mask)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}


@program(slow=True)
def speech_transformer():
    """Speech transformer: a dict as data, a list as input of call, a mask as sample weight."""
    rng = np.random.default_rng(0)
    data = {
        "source": rng.normal(size=(35, 8, 4)).astype("float32"),
        "target": rng.integers(0, 9, (35, 5)),
    }
    model = SpeechTransformer()
    model.compile(
        optimizer=keras.optimizers.Adam(0.005, epsilon=1e-3),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    )
    history = model.fit(tf.data.Dataset.from_tensor_slices(data).batch(16), epochs=2, verbose=0)
    return outcome(history, model)


class Word2Vec(keras.Model):
    def __init__(self, vocab_size, embedding_dim):
        super().__init__()
        self.target_embedding = layers.Embedding(vocab_size, embedding_dim, name="w2v_embedding")
        self.context_embedding = layers.Embedding(vocab_size, embedding_dim)

    def call(self, pair):
        target, context = pair
        if len(target.shape) == 2:
            target = tf.squeeze(target, axis=1)
        word_emb = self.target_embedding(target)
        context_emb = self.context_embedding(context)
        return tf.einsum("be,bce->bc", word_emb, context_emb)


@program
def skip_grams():
    """word2vec: skip-grams with negative samples in the data, a subclass with a tuple input."""
    rng = np.random.default_rng(0)
    target, context = rng.integers(0, 15, (50, 1)), rng.integers(0, 15, (50, 4))
    labels = np.tile([1, 0, 0, 0], (50, 1))
    data = tf.data.Dataset.from_tensor_slices(((target, context), labels)).batch(16)
    model = Word2Vec(15, 6)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss=loss, metrics=["accuracy"])
    history = model.fit(data, epochs=2, verbose=0)
    return outcome(history, model, vectors=model.get_layer("w2v_embedding").get_weights())


class CharacterModel(keras.Model):
    """GRU that can take and return its states."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(12, 6)
        self.gru = layers.GRU(8, return_sequences=True, return_state=True)
        self.dense = layers.Dense(12)

    def call(self, inputs, states=None, return_state=False, training=False):
        x, states = self.gru(self.embedding(inputs), initial_state=states, training=training)
        x = self.dense(x, training=training)
        return (x, states) if return_state else x


@program(slow=True)
def character_gru():
    """Text generation with a GRU: windows by tf.data, full batches only, states at inference."""
    ids = tf.data.Dataset.from_tensor_slices(np.random.default_rng(0).integers(0, 12, 290))
    windows = ids.batch(7, drop_remainder=True).map(lambda w: (w[:-1], w[1:]))
    data = windows.shuffle(50, seed=1, reshuffle_each_iteration=False)
    data = data.batch(16, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    model = CharacterModel()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3), loss=loss)
    checkpoint = keras.callbacks.ModelCheckpoint("ckpt_{epoch}.weights.h5", save_weights_only=True)
    history = model.fit(data, epochs=2, callbacks=[checkpoint], verbose=0)
    logits, states = model(np.array([[3]]), return_state=True)
    logits, _ = model(np.array([[4]]), states=states, return_state=True)
    return outcome(history, model, logits=np.asarray(logits))


@program(slow=True)
def image_captions():
    """Captions: a frozen network sees images, a decoder gets words; inputs are a tuple."""
    rng = np.random.default_rng(0)
    images = rng.random((33, 6, 6, 1)).astype("float32")
    words = _sentences(33, 5, 12)
    cnn = keras.Sequential([keras.Input((6, 6, 1)), layers.Conv2D(4, 3), layers.Reshape((-1, 4))])
    cnn.trainable = False
    picture, text = keras.Input((6, 6, 1)), keras.Input((5,), dtype="int64")
    z = TokenAndPositionEmbedding(5, 12, 8)(text)
    attention = layers.MultiHeadAttention(1, 4, use_bias=False)  # Lion follows the sign of noise
    z = layers.LayerNormalization()(z + attention(z, cnn(picture)))
    model = keras.Model((picture, text), layers.Dense(12)(z))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Lion(1e-3), loss, metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(((images, words), np.roll(words, -1, 1))).batch(16)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0)
    return outcome(history, model)
