"""Programs that generate: GANs, autoencoders, diffusion, and flows. Noise is part of the data."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import UPDATED_IN_TURN, outcome, program


def _images(n, seed=0):
    return np.random.default_rng(seed).random((n, 8, 8, 1)).astype("float32")


def _noise(n, *shape, seed=1):
    return np.random.default_rng(seed).normal(size=(n, *shape)).astype("float32")


def _discriminator(channels=1):
    return keras.Sequential(
        [
            keras.Input(shape=(8, 8, channels)),
            layers.Conv2D(4, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


def _generator(latent=4):
    return keras.Sequential(
        [
            keras.Input(shape=(latent,)),
            layers.Dense(4 * 4 * 4),
            layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(4, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, kernel_size=3, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real_images, noise = data
        batch_size = ops.shape(real_images)[0]
        generated_images = self.generator(noise)
        combined_images = ops.concatenate([generated_images, real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(grads, self.discriminator.trainable_weights, strict=True)
        )
        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class Monitor(keras.callbacks.Callback):
    """Generates images after each epoch."""

    def __init__(self, noise):
        super().__init__()
        self.noise, self.images = noise, []

    def on_epoch_end(self, epoch, logs=None):
        self.images.append(np.asarray(self.model.generator(self.noise)))


@program(differs=UPDATED_IN_TURN)
def dcgan():
    """DCGAN: two networks and two optimizers in train_step, a callback that generates; no call."""
    gan = GAN(_discriminator(), _generator())
    gan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.005, epsilon=1e-3),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.005, epsilon=1e-3),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    monitor = Monitor(_noise(3, 4, seed=5))
    data = tf.data.Dataset.from_tensor_slices((_images(37), _noise(37, 4))).batch(16)
    history = gan.fit(data, epochs=2, callbacks=[monitor], verbose=0)
    return outcome(history, gan.generator, gan.discriminator, images=monitor.images)


class ConditionalGAN(GAN):
    def train_step(self, data):
        (images, labels), noise = data
        one_hot = ops.one_hot(labels, 3)
        planes = ops.repeat(one_hot, repeats=[64])
        planes = ops.reshape(planes, (-1, 3, 8, 8))
        planes = ops.transpose(planes, (0, 2, 3, 1))
        conditioned = ops.concatenate([noise, one_hot], axis=1)
        fake = ops.concatenate([self.generator(conditioned), planes], -1)
        real = ops.concatenate([images, planes], -1)
        n = ops.shape(labels)[0]
        targets = ops.concatenate([ops.ones((n, 1)), ops.zeros((n, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(targets, self.discriminator(ops.concatenate([fake, real])))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            fake = ops.concatenate([self.generator(conditioned), planes], -1)
            g_loss = self.loss_fn(ops.zeros((n, 1)), self.discriminator(fake))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


@program(
    slow=True,
    differs=UPDATED_IN_TURN,
)
def conditional_gan():
    """Conditional GAN: labels as additional channels, optimizer.apply instead of pairs."""
    gan = ConditionalGAN(_discriminator(4), _generator(7))
    gan.compile(
        keras.optimizers.SGD(0.1, momentum=0.5),
        keras.optimizers.Adam(0.005, beta_1=0.5, epsilon=1e-3),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    labels = np.random.default_rng(2).integers(0, 3, 37)
    data = tf.data.Dataset.from_tensor_slices(((_images(37), labels), _noise(37, 4))).batch(16)
    history = gan.fit(data, epochs=2, verbose=0)
    return outcome(history, gan.generator, gan.discriminator)


class WGAN(keras.Model):
    """Wasserstein GAN with a gradient penalty and several discriminator updates per step."""

    def __init__(self, discriminator, generator, steps=2, gp_weight=10.0):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.d_steps, self.gp_weight = steps, gp_weight

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def gradient_penalty(self, share, real, fake):
        interpolated = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(interpolated)
            predicted = self.discriminator(interpolated, training=True)
        gradient = tape.gradient(predicted, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradient), axis=[1, 2, 3]) + 1e-8)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, data):
        real, noise, share = data
        for step in range(self.d_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(noise[:, step], training=True)
                d_cost = tf.reduce_mean(self.discriminator(fake, training=True)) - tf.reduce_mean(
                    self.discriminator(real, training=True)
                )
                d_loss = d_cost + self.gp_weight * self.gradient_penalty(share, real, fake)
            gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(
                zip(gradient, self.discriminator.trainable_variables, strict=True)
            )
        with tf.GradientTape() as tape:
            fake = self.generator(noise[:, -1], training=True)
            g_loss = -tf.reduce_mean(self.discriminator(fake, training=True))
        gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(
            zip(gradient, self.generator.trainable_variables, strict=True)
        )
        return {"d_loss": d_loss, "g_loss": g_loss}


@program(atol=5e-4, differs=UPDATED_IN_TURN)
def wasserstein_gan():
    """WGAN-GP: gradient penalty, two discriminator updates per step, losses returned as logs."""
    gan = WGAN(_discriminator(), _generator())
    gan.compile(keras.optimizers.SGD(learning_rate=0.001), keras.optimizers.SGD(learning_rate=0.01))
    share = np.random.default_rng(3).random((32, 1, 1, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((_images(32), _noise(32, 3, 4), share)).batch(16)
    history = gan.fit(data, epochs=2, verbose=0)
    return outcome(history, gan.generator, gan.discriminator)


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def train_step(self, data):
        images, noise = data
        with tf.GradientTape() as tape:
            z_mean, z_log_var = self.encoder(images)
            z = z_mean + ops.exp(0.5 * z_log_var) * noise
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(
                ops.sum(keras.losses.binary_crossentropy(images, reconstruction), axis=(1, 2))
            )
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


@program(slow=True)
def variational_autoencoder():
    """VAE with three loss trackers and train_step; the model has no call."""
    inputs = keras.Input(shape=(8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
    x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
    encoder = keras.Model(inputs, [layers.Dense(2)(x), layers.Dense(2)(x)], name="encoder")
    latent = keras.Input(shape=(2,))
    x = layers.Reshape((4, 4, 2))(layers.Dense(4 * 4 * 2, activation="relu")(latent))
    x = layers.Conv2DTranspose(1, 3, activation="sigmoid", strides=2, padding="same")(x)
    decoder = keras.Model(latent, x, name="decoder")
    vae = VAE(encoder, decoder)
    vae.compile(optimizer=keras.optimizers.Adam(0.005, epsilon=1e-3))
    history = vae.fit(_images(39), _noise(39, 2), epochs=2, batch_size=16, verbose=0)
    vae.decoder.save("decoder.keras")
    loaded = keras.models.load_model("decoder.keras", compile=False)
    loaded = loaded.predict(_noise(5, 2, seed=9), verbose=0)
    return outcome(
        history, vae, loaded=loaded, decoded=vae.decoder.predict(_noise(5, 2, seed=9), verbose=0)
    )


class KLDivergence(layers.Layer):
    """Passes its inputs, and adds their divergence from a normal distribution to the loss."""

    def call(self, inputs):
        mean, log_var = inputs
        kl = -0.5 * ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=1)
        self.add_loss(ops.mean(kl))
        return inputs


@program(slow=True)
def functional_vae():
    """Functional VAE: a layer adds the divergence with add_loss, the rest is compile and fit."""
    x, noise = _images(39).reshape(39, 64), _noise(39, 2)
    images, epsilon = keras.Input((64,), name="images"), keras.Input((2,), name="epsilon")
    z = layers.Dense(8, activation="relu")(images)
    mean, log_var = KLDivergence()([layers.Dense(2)(z), layers.Dense(2)(z)])
    z = mean + ops.exp(0.5 * log_var) * epsilon
    decoded = layers.Dense(64, activation="sigmoid")(layers.Dense(8, activation="relu")(z))
    model = keras.Model([images, epsilon], decoded)
    model.compile("rmsprop", keras.losses.BinaryCrossentropy())
    history = model.fit([x, noise], x, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict([x, noise], verbose=0))


class VectorQuantizer(layers.Layer):
    def __init__(self, num_embeddings, embedding_dim, beta=0.25, **kwargs):
        super().__init__(**kwargs)
        self.beta, self.dim, self.count = beta, embedding_dim, num_embeddings

    def build(self, shape):
        self.embeddings = self.add_weight(
            shape=(self.dim, self.count), initializer="random_uniform", trainable=True
        )

    def call(self, x):
        flat = ops.reshape(x, [-1, self.dim])
        distances = (
            ops.sum(flat**2, axis=1, keepdims=True)
            + ops.sum(self.embeddings**2, axis=0)
            - 2 * ops.matmul(flat, self.embeddings)
        )
        codes = ops.one_hot(ops.argmin(distances, axis=1), self.count)
        quantized = ops.matmul(codes, ops.transpose(self.embeddings))
        quantized = ops.reshape(quantized, ops.shape(x))
        commitment = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
        codebook = ops.mean((quantized - ops.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment + codebook)
        return x + ops.stop_gradient(quantized - x)


class VQTrainer(keras.Model):
    def __init__(self, variance):
        super().__init__()
        self.variance = variance
        self.vqvae = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, strides=2, padding="same"),
                VectorQuantizer(6, 4),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same"),
            ]
        )
        self.total = keras.metrics.Mean(name="loss")
        self.vq = keras.metrics.Mean(name="vq_loss")

    @property
    def metrics(self):
        return [self.total, self.vq]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstructions = self.vqvae(x)
            reconstruction_loss = ops.mean((x - reconstructions) ** 2) / self.variance
            total_loss = reconstruction_loss + sum(self.vqvae.losses)
        grads = tape.gradient(total_loss, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.vqvae.trainable_variables, strict=True))
        self.total.update_state(total_loss)
        self.vq.update_state(sum(self.vqvae.losses))
        return {"loss": self.total.result(), "vqvae_loss": self.vq.result()}


@program(slow=True)
def vector_quantized_vae():
    """VQ-VAE: straight-through codes, losses of a layer in the step, images as the only data."""
    x = _images(40)
    trainer = VQTrainer(float(np.var(x)))
    trainer.compile(optimizer=keras.optimizers.Adam(0.005, epsilon=1e-3))
    history = trainer.fit(tf.data.Dataset.from_tensor_slices(x).batch(16), epochs=2, verbose=0)
    return outcome(history, trainer.vqvae, predicted=trainer.vqvae.predict(x, verbose=0))


class Diffusion(keras.Model):
    """Predicts the noise of noisy images; a second network is its moving average."""

    def __init__(self, network, ema_network):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = network
        self.ema_network = ema_network

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def denoise(self, noisy, noise_rates, signal_rates, training):
        network = self.network if training else self.ema_network
        noises = network([noisy, noise_rates**2], training=training)
        return noises, (noisy - noise_rates * noises) / signal_rates

    def mixed(self, data):
        images, noises, times = data
        images = self.normalizer(images, training=True)
        angle = 0.3 + ops.reshape(times, (-1, 1, 1, 1)) * 0.9
        noise_rates, signal_rates = ops.sin(angle), ops.cos(angle)
        return images, noises, noise_rates, signal_rates

    def train_step(self, data):
        images, noises, noise_rates, signal_rates = self.mixed(data)
        noisy = signal_rates * images + noise_rates * noises
        with tf.GradientTape() as tape:
            found, found_images = self.denoise(noisy, noise_rates, signal_rates, training=True)
            noise_loss = self.loss(noises, found)
            image_loss = self.loss(images, found_images)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        images, noises, noise_rates, signal_rates = self.mixed(data)
        noisy = signal_rates * images + noise_rates * noises
        found, found_images = self.denoise(noisy, noise_rates, signal_rates, training=False)
        self.noise_loss_tracker.update_state(self.loss(noises, found))
        self.image_loss_tracker.update_state(self.loss(images, found_images))
        return {m.name: m.result() for m in self.metrics}


def _noise_network():
    noisy, variances = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    z = layers.Concatenate()([noisy, layers.UpSampling2D(8)(variances)])
    z = layers.Conv2D(4, 3, padding="same", activation="swish")(z)
    skip = z
    z = layers.Conv2D(6, 3, padding="same", strides=2, activation="swish")(z)
    z = layers.Concatenate()([layers.UpSampling2D(2, interpolation="bilinear")(z), skip])
    return keras.Model([noisy, variances], layers.Conv2D(1, 1, kernel_initializer="zeros")(z))


@program(slow=True)
def denoising_diffusion():
    """Diffusion: adapted Normalization, a cloned EMA network, validation; the model has no call."""
    images, noises = _images(36), _noise(36, 8, 8, 1)
    times = np.random.default_rng(2).random(36).astype("float32")
    network = _noise_network()
    model = Diffusion(network, keras.models.clone_model(network))
    model.normalizer.adapt(images)
    model.ema_network.set_weights(network.get_weights())
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=0.01, weight_decay=1e-3, epsilon=1e-3),
        loss=keras.losses.mean_absolute_error,
    )
    data = tf.data.Dataset.from_tensor_slices((images, noises, times)).batch(16)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0)
    return outcome(history, network, model.ema_network)


class CouplingFlow(keras.Model):
    """RealNVP: affine coupling layers; `call` returns points and log-determinants."""

    def __init__(self, layers_count=3):
        super().__init__()
        self.masks = np.array([[0, 1], [1, 0]] * layers_count, "float32")[:layers_count]
        self.tracker = keras.metrics.Mean(name="loss")
        self.scales = [self.coupling("tanh") for _ in range(layers_count)]
        self.shifts = [self.coupling("linear") for _ in range(layers_count)]

    def coupling(self, activation):
        return keras.Sequential(
            [
                keras.Input((2,)),
                layers.Dense(6, activation="relu", kernel_regularizer="l2"),
                layers.Dense(2, activation=activation),
            ]
        )

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x, training=True):
        direction = -1 if training else 1
        log_det = 0.0
        gate = (direction - 1) / 2
        for n in range(len(self.masks))[::direction]:
            masked = x * self.masks[n]
            scale = self.scales[n](masked) * (1 - self.masks[n])
            shift = self.shifts[n](masked) * (1 - self.masks[n])
            moved = (x - shift) * ops.exp(-scale) if training else x * ops.exp(scale) + shift
            x = masked + (1 - self.masks[n]) * moved
            log_det += gate * ops.sum(scale, axis=1)
        return x, log_det

    def log_loss(self, x):
        y, log_det = self(x)
        density = -0.5 * ops.sum(ops.square(y), axis=-1) - np.log(2 * np.pi)
        return -ops.mean(density + log_det)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.log_loss(data)
        g = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.log_loss(data))
        return {"loss": self.tracker.result()}


@program(slow=True)
def normalizing_flow():
    """RealNVP: log-likelihood as the loss, fit with a validation split."""
    x = _noise(50, 2)
    model = CouplingFlow()
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01, epsilon=1e-3))
    history = model.fit(x, batch_size=16, epochs=2, validation_split=0.2, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


class CycleGAN(keras.Model):
    """Two generators and two discriminators with four optimizers and one persistent tape."""

    def __init__(self):
        super().__init__()
        self.gen_g, self.gen_f = (self.translator() for _ in range(2))
        self.disc_x, self.disc_y = _discriminator(), _discriminator()

    def translator(self):
        return keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(1, 3, padding="same")])

    def call(self, inputs):
        return self.disc_x(inputs[0]), self.disc_y(inputs[1]), self.gen_g(inputs[0])

    def compile(self, optimizers):
        super().compile()
        self.all_optimizers = optimizers
        self.mae, self.mse = keras.losses.MeanAbsoluteError(), keras.losses.MeanSquaredError()

    def train_step(self, batch):
        real_x, real_y = batch
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_g(real_x), self.gen_f(real_y)
            cycled_x, cycled_y = self.gen_f(fake_y), self.gen_g(fake_x)
            judged = [self.disc_x(real_x), self.disc_x(fake_x)]
            judged += [self.disc_y(real_y), self.disc_y(fake_y)]
            cycle = self.mae(real_x, cycled_x) + self.mae(real_y, cycled_y)
            g_loss = self.mse(ops.ones_like(judged[3]), judged[3]) + 10 * cycle
            f_loss = self.mse(ops.ones_like(judged[1]), judged[1]) + 10 * cycle
            x_loss = 0.5 * (
                self.mse(ops.ones_like(judged[0]), judged[0])
                + self.mse(ops.zeros_like(judged[1]), judged[1])
            )
            y_loss = 0.5 * (
                self.mse(ops.ones_like(judged[2]), judged[2])
                + self.mse(ops.zeros_like(judged[3]), judged[3])
            )
        losses = {"G_loss": g_loss, "F_loss": f_loss, "X_loss": x_loss, "Y_loss": y_loss}
        networks = (self.gen_g, self.gen_f, self.disc_x, self.disc_y)
        gradients = [
            tape.gradient(loss, network.trainable_variables)
            for loss, network in zip(losses.values(), networks, strict=True)
        ]
        for optimizer, grads, network in zip(self.all_optimizers, gradients, networks, strict=True):
            optimizer.apply_gradients(zip(grads, network.trainable_variables, strict=True))
        return losses


@program(slow=True)
def cycle_gan():
    """CycleGAN: four optimizers, a persistent tape, and losses that are returned as logs."""
    model = CycleGAN()
    model.compile([keras.optimizers.Adam(2e-3, beta_1=0.5, epsilon=1e-3) for _ in range(4)])
    horses = tf.data.Dataset.from_tensor_slices(_images(24)).batch(6)
    zebras = tf.data.Dataset.from_tensor_slices(_images(24, 1)).batch(6)
    history = model.fit(tf.data.Dataset.zip((horses, zebras)), epochs=2, verbose=0)
    return outcome(history, model.gen_g, model.gen_f, model.disc_x, model.disc_y)
