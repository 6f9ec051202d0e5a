"""Training loops written with `kdist.step` equal those of one device."""

import json
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from tests.forked import python, python_tasks, run_program
from tests.tiers import seldom

# The last batch has one row, so that one of two replicas has none.
_X = np.random.default_rng(0).normal(size=(17, 4)).astype("float32")
_Y = _X.sum(1, keepdims=True)


def _data():
    return tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(8)


def _dense(units, inputs=4, activation=None):
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(units, activation)])


def _train(build, devices, **options):
    """Returns the weights after two epochs, and the logs of each epoch."""
    keras.utils.set_random_seed(0)
    strategy = (
        kdist.create_strategy("mirrored", devices=devices)
        if devices > 1
        else kdist.create_strategy("one_device")
    )
    with strategy.scope():
        models, optimizers, metrics, function = build()
    step = kdist.step(strategy, **options)(function)
    with kdist.session(models, optimizers, metrics) as session:
        logs = list(session.run(step, _data(), epochs=2))
    return [w for m in models for w in m.get_weights()], logs


def regression():
    """TensorFlow's and Keras's guides: a loss per example, and a metric."""
    model = _dense(1)
    optimizer = keras.optimizers.Adam(0.05, clipnorm=0.1)
    metric = keras.metrics.MeanSquaredError(name="error")

    def train_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = kdist.mean(tf.square(predicted - y))
        variables = model.trainable_variables
        kdist.apply(optimizer, tape.gradient(loss, variables), variables)
        metric.update_state(y, predicted)
        return {"loss": loss, "error": metric.result()}

    return [model], [optimizer], [metric], train_step


def regularized():
    """TensorFlow's guides add the model's own losses, which are not a mean over examples."""
    layer = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
    model = keras.Sequential([keras.Input((4,)), layer])
    optimizer = keras.optimizers.SGD(0.05)
    metric = keras.metrics.MeanSquaredError(name="error")

    def train_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = kdist.mean(tf.square(predicted - y)) + tf.add_n(model.losses)
        variables = model.trainable_variables
        kdist.apply(optimizer, tape.gradient(loss, variables), variables)
        metric.update_state(y, predicted)
        return {"loss": loss, "error": metric.result()}

    return [model], [optimizer], [metric], train_step


def gan():
    """DCGAN's loop: two models and two optimizers."""
    generator, critic = _dense(4), _dense(1)
    optimizers = [keras.optimizers.Adam(0.01, beta_1=0.5) for _ in range(2)]
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def train_step(batch):
        real, _ = batch
        with tf.GradientTape(persistent=True) as tape:
            fake = generator(tf.sin(3.0 * real), training=True)
            on_real, on_fake = critic(real, training=True), critic(fake, training=True)
            ones, zeros = tf.ones_like(on_real), tf.zeros_like(on_fake)
            critic_loss = kdist.mean(cross_entropy(ones, on_real) + cross_entropy(zeros, on_fake))
            generator_loss = kdist.mean(cross_entropy(ones, on_fake))
        for model, optimizer, loss in zip(
            (generator, critic), optimizers, (generator_loss, critic_loss), strict=True
        ):
            variables = model.trainable_variables
            kdist.apply(optimizer, tape.gradient(loss, variables), variables)
        return {"critic": critic_loss, "generator": generator_loss}

    return [generator, critic], optimizers, [], train_step


def wgan_gp():
    """WGAN-GP: a gradient penalty of second order, and several updates of the critic in a step."""
    generator, critic = _dense(4), _dense(1, activation="tanh")
    optimizers = [keras.optimizers.Adam(0.01, beta_1=0.5) for _ in range(2)]

    def train_step(batch):
        real, _ = batch
        for number in range(3):
            with tf.GradientTape() as tape:
                fake = generator(tf.sin(real + number), training=True)
                between = 0.5 * (real + fake)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    scores = critic(between, training=True)
                norm = tf.norm(inner.gradient(scores, between), axis=1)
                distance = critic(fake, training=True) - critic(real, training=True)
                critic_loss = kdist.mean(distance[:, 0] + 10.0 * tf.square(norm - 1.0))
            variables = critic.trainable_variables
            kdist.apply(optimizers[1], tape.gradient(critic_loss, variables), variables)
        with tf.GradientTape() as tape:
            fake = generator(tf.sin(real), training=True)
            generator_loss = kdist.mean(-critic(fake, training=True))
        variables = generator.trainable_variables
        kdist.apply(optimizers[0], tape.gradient(generator_loss, variables), variables)
        return {"critic": critic_loss, "generator": generator_loss}

    return [generator, critic], optimizers, [], train_step


def vae():
    """VAE: reconstruction and divergence, with the noise of each example in the data."""
    encoder, decoder = _dense(4), _dense(4, inputs=2)
    optimizer = keras.optimizers.Adam(0.01)

    def train_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            center, log_variance = tf.split(encoder(x, training=True), 2, axis=1)
            code = center + tf.sin(5.0 * y) * tf.exp(0.5 * log_variance)
            error = tf.reduce_sum(tf.square(decoder(code, training=True) - x), axis=1)
            divergence = -0.5 * tf.reduce_sum(
                1 + log_variance - tf.square(center) - tf.exp(log_variance), axis=1
            )
            loss = kdist.mean(error + divergence)
        variables = encoder.trainable_variables + decoder.trainable_variables
        kdist.apply(optimizer, tape.gradient(loss, variables), variables)
        return {"loss": loss}

    return [encoder, decoder], [optimizer], [], train_step


def actor_critic():
    """Actor-critic on recorded returns: the advantage is a constant for the actor."""
    actor, critic = _dense(2), _dense(1)
    optimizer = keras.optimizers.Adam(0.01)

    def train_step(batch):
        x, returns = batch
        actions = tf.cast(x[:, 0] > 0, "int32")
        with tf.GradientTape() as tape:
            value = critic(x, training=True)
            advantage = tf.stop_gradient(returns - value)[:, 0]
            log_probability = -tf.nn.sparse_softmax_cross_entropy_with_logits(
                actions, actor(x, training=True)
            )
            loss = kdist.mean(tf.square(returns - value)[:, 0] - log_probability * advantage)
        variables = actor.trainable_variables + critic.trainable_variables
        kdist.apply(optimizer, tape.gradient(loss, variables), variables)
        return {"loss": loss}

    return [actor, critic], [optimizer], [], train_step


def maml():
    """MAML: each example is a task, adapted by one inner step that is differentiated."""
    model, optimizer = _dense(1), keras.optimizers.SGD(0.01)

    def train_step(batch):
        x, y = batch
        kernel, bias = model.trainable_variables
        with tf.GradientTape() as tape:
            kernels = tf.tile(kernel[None], [tf.shape(x)[0], 1, 1])
            with tf.GradientTape() as inner:
                inner.watch(kernels)
                error = tf.square(tf.einsum("bi,bio->bo", x, kernels) + bias - y)
            kernels -= 0.1 * inner.gradient(error, kernels)
            query, target = tf.sin(x), tf.cos(y)
            adapted = tf.einsum("bi,bio->bo", query, kernels) + bias
            loss = kdist.mean(tf.square(adapted - target))
        kdist.apply(optimizer, tape.gradient(loss, [kernel, bias]), [kernel, bias])
        return {"loss": loss}

    return [model], [optimizer], [], train_step


_SLOW = [pytest.param(b, marks=pytest.mark.slow) for b in (wgan_gp, maml)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "build", [regression, regularized, gan, *_SLOW, *seldom([vae, actor_critic])]
)
def test_two_replicas_equal_one_device(build):
    expected, expected_logs = _train(build, 1)
    found, logs = _train(build, 2)
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)
    for one, two in zip(expected_logs, logs, strict=True):
        assert two == pytest.approx(one, abs=1e-5)
        assert all(one.values())  # Keras's own tracker of the loss would stay at 0


@pytest.mark.exhaustive
def test_accumulation_and_several_steps_per_call_change_nothing():
    expected, _ = _train(regression, 1)
    found, _ = _train(regression, 2, accumulate=2, steps_per_execution=2)
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)


def test_errors_name_the_line_to_change():
    strategy = kdist.create_strategy("mirrored", devices=2)
    outside = _dense(1)
    with strategy.scope():
        model = _dense(1)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())

    @kdist.step(strategy)
    def train_step(batch):
        with tf.GradientTape() as tape:
            loss = kdist.mean(model(batch[0], training=True))
        variables = model.trainable_variables
        kdist.apply(optimizer, tape.gradient(loss, variables), variables)

    with pytest.raises(TypeError, match="strategy"):
        kdist.step(train_step)
    with pytest.raises(RuntimeError, match="session"):
        train_step(next(iter(_data())))
    with pytest.raises(RuntimeError, match="kdist.step"):
        strategy.run(lambda: kdist.mean(tf.ones(3)))
    with pytest.raises(ValueError, match="run_dir"):
        kdist.session(model, optimizer, checkpoint_steps=1)
    with pytest.raises(TypeError, match="optimizers"):
        kdist.session(model, "adam")
    averaged = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(use_ema=True))
    with pytest.raises(ValueError, match="use_ema"):
        kdist.session(model, [optimizer, averaged])
    with pytest.raises(ValueError, match="scope"):
        kdist.session(outside, optimizer).run(train_step, _data())
    with pytest.raises(TypeError, match="dataset"):
        kdist.session(model, optimizer).run(train_step, _X)
    with pytest.raises(ValueError, match="scale_loss"):
        list(kdist.session(model, optimizer).run(train_step, _data()))


@pytest.mark.parametrize("returned", [None, 1.0])
def test_a_step_that_returns_no_logs_says_so(returned):
    strategy = kdist.create_strategy("mirrored", devices=2)
    with strategy.scope():
        model, optimizer = _dense(1), keras.optimizers.SGD()

    @kdist.step(strategy)
    def train_step(batch):
        return returned

    with pytest.raises(TypeError, match="train_step returned .*a dict of logs"):
        list(kdist.session(model, optimizer).run(train_step, _data()))


def test_an_optimizer_within_a_condition_names_what_to_change():
    strategy = kdist.create_strategy("mirrored", devices=2)
    with strategy.scope():
        model, optimizer = _dense(1), keras.optimizers.SGD()
        optimizer.build(model.trainable_weights)

    @kdist.step(strategy)
    def every_second(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_weights)

        def apply():
            optimizer.apply(gradients, model.trainable_weights)
            return True

        tf.cond(optimizer.iterations % 2 == 0, apply, lambda: False)
        return {"loss": loss}

    with pytest.raises(ValueError, match="accumulate"):
        list(kdist.session(model, optimizer).run(every_second, _data()))


def test_a_step_of_two_arguments_is_refused_where_it_is_defined():
    strategy = kdist.create_strategy("mirrored", devices=2)
    with pytest.raises(TypeError, match=r"train_step\(x, y\) must accept one argument"):

        @kdist.step(strategy)
        def train_step(x, y):
            return {}


def test_distributed_data_and_functions_of_tensorflow(caplog):
    """TensorFlow converts neither kdist's functions, nor logs that it cannot."""
    strategy = kdist.create_strategy("mirrored", devices=2)
    results = []
    for wrap, distribute in (
        (lambda function: function, lambda data: data),
        (tf.function, strategy.experimental_distribute_dataset),
    ):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, optimizer = _dense(1), keras.optimizers.SGD()

        def train_step(batch, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = kdist.mean(model(kdist.gather_batch(batch[0]), training=True))
            variables = model.trainable_variables
            kdist.apply(optimizer, tape.gradient(loss, variables), variables)
            return {"loss": loss}

        step = kdist.step(strategy)(wrap(train_step))
        (logs,) = kdist.session(model, optimizer).run(step, distribute(_data()))
        results.append(logs["loss"])
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert "AutoGraph" not in caplog.text


def test_a_loss_scale_gives_the_same_update():
    def scaled():
        model = _dense(1)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

        def train_step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = kdist.mean(tf.square(model(x, training=True) - y))
                to_minimize = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            kdist.apply(optimizer, tape.gradient(to_minimize, variables), variables)
            return {"loss": loss}

        return [model], [optimizer], [], train_step

    expected, _ = _train(scaled, 1)
    found, _ = _train(scaled, 2)
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)


def test_leaving_the_loop_ends_the_training():
    ended = []
    on_end = keras.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append(logs))
    model, optimizer, metric, function = (
        part[0] if isinstance(part, list) else part for part in regression()
    )
    step = kdist.step(tf.distribute.get_strategy())(function)
    with kdist.session(model, optimizer, metric, callbacks=[on_end]) as session:
        for _ in session.run(step, _data(), epochs=5):
            break
    assert len(ended) == 1
    assert int(optimizer.iterations) == 3

    def fail():
        with kdist.session(model, optimizer, metric, callbacks=[on_end]) as session:
            next(session.run(step, _data(), epochs=5))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(ended) == 1


LEFT = """
import gc, sys
import keras, kdist
import tensorflow as tf

model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.01)


@kdist.step(tf.distribute.get_strategy())
def train_step(batch):
    with tf.GradientTape() as tape:
        loss = kdist.mean(model(batch) ** 2)
    kdist.apply(optimizer, tape.gradient(loss, model.weights), model.weights)
    return {"loss": loss}


def train():
    data = tf.data.Dataset.from_tensors(tf.ones((2, 1))).repeat(3)
    session = kdist.session(model, optimizer, run_dir=sys.argv[1], checkpoint_steps=2)
    epochs = session.run(train_step, data, epochs=3)
    next(epochs)
    return session, epochs


gc.disable()
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "line", ["kept = train()", "kept = [*train()]; kept.append(kept); del kept"]
)
def test_a_program_ends_that_has_left_its_loop(line, tmp_path):
    command = [sys.executable, "-c", LEFT + line, str(tmp_path / "run")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert process.returncode == 0, process.stderr
    assert "Error" not in process.stderr
    assert "kdist: report: " in process.stdout + process.stderr


PROGRAM = """
import json, os, signal, sys
import keras, kdist
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).normal(size=(33, 4)).astype("float32")


def train(strategy, run_dir=None, kill_at=None):
    keras.utils.set_random_seed(0)
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(8)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05)
        metric = keras.metrics.MeanSquaredError(name="error")

    @kdist.step(strategy)
    def train_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = kdist.mean(tf.square(predicted - y))
        variables = model.trainable_variables
        kdist.apply(optimizer, tape.gradient(loss, variables), variables)
        metric.update_state(y, predicted)
        return {"loss": loss, "error": metric.result()}

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if optimizer.iterations.numpy() == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    options = {"run_dir": run_dir, "checkpoint_steps": 1} if run_dir else {}
    with kdist.session(model, optimizer, metric, callbacks=[Kill()], **options) as session:
        logs = list(session.run(train_step, data, epochs=3))
    return [[w.tolist() for w in model.get_weights()], logs[-1]]
"""


@pytest.mark.slow
def test_a_killed_loop_resumes_bit_equal(tmp_path):
    program = tmp_path / "loop.py"
    program.write_text(
        PROGRAM
        + """
strategy = kdist.create_strategy("mirrored", devices=2)
kill_at = int(sys.argv[2]) if len(sys.argv) > 2 else None
print(json.dumps(train(strategy, sys.argv[1], kill_at)))
"""
    )
    whole = run_program(program, str(tmp_path / "whole"))
    killed = run_program(program, str(tmp_path / "killed"), "8")  # in the middle of epoch 2
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "killed" / "checkpoints").glob("step-*"))
    resumed = run_program(program, str(tmp_path / "killed"))
    assert "resumed" in resumed.stderr + resumed.stdout
    assert (tmp_path / "killed" / "metrics.jsonl").exists()
    assert _last_line(resumed) == _last_line(whole)


def _last_line(process):
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "tasks"),
    [
        *seldom([("multi_worker", {"worker": 2})]),
        ("parameter_server", {"chief": 1, "worker": 2, "ps": 1}),
    ],
)
def test_jobs_equal_one_device(strategy, tasks, tmp_path):
    code = """
strategy = kdist.create_strategy("{}")
print(json.dumps(train(strategy, *sys.argv[1:])))
"""
    (expected, expected_logs) = python(PROGRAM + code.format("one_device"))
    weights, logs = python_tasks(
        PROGRAM + code.format(strategy), tasks, [str(tmp_path)], timeout_seconds=120
    )[0]
    assert (tmp_path / "metrics.jsonl").exists()
    assert list((tmp_path / "checkpoints").glob("step-*"))
    assert expected_logs["loss"]
    for one, two in zip(expected, weights, strict=True):
        np.testing.assert_allclose(two, one, atol=1e-5)
    assert logs == pytest.approx(expected_logs, abs=1e-5)
