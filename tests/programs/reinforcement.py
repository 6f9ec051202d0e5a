"""Programs of reinforcement learning, on a small environment without randomness."""

import keras
import numpy as np
from keras import layers

from tests.programs.program import outcome, program


class Corridor:
    """Five cells; reward at the right end."""

    def reset(self):
        self.cell = 2
        return np.eye(5)[self.cell]

    def step(self, action):
        self.cell += 1 if action else -1
        return np.eye(5)[np.clip(self.cell, 0, 4)], float(self.cell == 4), self.cell in (0, 4)


def _network(outputs, activation=None):
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, "relu"), layers.Dense(outputs, activation)]
    )


@program
def q_learning():
    """Deep Q-learning: predict_on_batch, train_on_batch, and a target network by set_weights."""
    rng, environment = np.random.default_rng(0), Corridor()
    model, target = _network(2), _network(2)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "huber")
    target.set_weights(model.get_weights())
    memory, losses = [], []
    for episode in range(4):
        state, done = environment.reset(), False
        while not done:
            values = model.predict_on_batch(state[None])[0]
            action = int(rng.integers(2)) if rng.random() < 0.5 else int(np.argmax(values))
            following, reward, done = environment.step(action)
            memory.append((state, action, reward, following, done))
            state = following
        chosen = [memory[n] for n in rng.integers(0, len(memory), 9)]
        states, actions, rewards, followings, ends = map(np.array, zip(*chosen, strict=True))
        future = target.predict_on_batch(followings).max(1)
        values = np.array(model.predict_on_batch(states))
        values[np.arange(9), actions] = rewards + 0.9 * future * (1 - ends)
        losses.append(float(model.train_on_batch(states, values)))
        if episode % 2:
            target.set_weights(model.get_weights())
    return outcome(losses, model, target)


@program
def policy_gradient():
    """REINFORCE through fit: returns are sample weights; sampled actions come from NumPy."""
    rng, environment = np.random.default_rng(0), Corridor()
    model = _network(2, "softmax")
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    logs = []
    for _ in range(2):
        states, actions, returns = [], [], []
        for _ in range(3):
            state, done, rewards = environment.reset(), False, []
            while not done:
                action = int(rng.random() < np.asarray(model(state[None]))[0, 1])
                states.append(state)
                actions.append(action)
                state, reward, done = environment.step(action)
                rewards.append(reward)
            returns += list(0.9 ** np.arange(len(rewards))[::-1] * (sum(rewards) + 0.1))
        fitted = model.fit(
            np.array(states), np.array(actions), sample_weight=np.array(returns),
            batch_size=64, epochs=2, verbose=0,
        )  # fmt: skip
        logs.append(fitted.history)
    return outcome(logs, model)


@program
def actor_critic():
    """Actor and critic share a network with two outputs; train_on_batch with weights, as a dict."""
    rng = np.random.default_rng(0)
    inputs = keras.Input((5,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    actor = layers.Dense(2, activation="softmax", name="actor")(hidden)
    critic = layers.Dense(1, name="critic")(hidden)
    model = keras.Model(inputs, {"actor": actor, "critic": critic})
    model.compile(
        keras.optimizers.RMSprop(0.01, epsilon=1e-3),
        {"actor": "sparse_categorical_crossentropy", "critic": "huber"},
        loss_weights={"actor": 1.0, "critic": 0.5},
    )
    logs = []
    for _ in range(3):
        states = rng.normal(size=(10, 5)).astype("float32")
        value = model.predict_on_batch(states)["critic"][:, 0]
        returns = rng.normal(size=10).astype("float32")
        logs.append(
            model.train_on_batch(
                states,
                {"actor": rng.integers(0, 2, 10), "critic": returns[:, None]},
                sample_weight={"actor": returns - value, "critic": np.ones(10)},
                return_dict=True,
            )
        )
    score = model.test_on_batch(states, {"actor": np.zeros(10), "critic": returns[:, None]})
    return outcome(logs, model, score=score)


@program(slow=True)
def eager_tape_loop():
    """Loop by hand with an eager GradientTape, as in many examples of reinforcement learning."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 5)).astype("float32"), rng.normal(size=(12, 2)).astype("float32")
    model, optimizer = _network(2), keras.optimizers.SGD(0.1)
    losses = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(float(loss))
    return outcome(losses, model)
