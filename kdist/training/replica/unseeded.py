"""Keras's global seed generator, for random numbers without a seed.

Keras creates it at its first use, which a replica cannot do, and stores it in a variable of the
thread, which the threads of replicas do not see. `share` creates it before the first step, in the
scope of the model's strategy.
"""

import contextlib
import random

import keras
import tensorflow as tf

from kdist.compat.keras import GLOBAL_SEED_GENERATOR, global_state


class _GlobalSeedGenerator(keras.random.SeedGenerator):
    """Generator that is created early, without a trace in other random numbers.

    Keras chooses its seed by Python's random numbers. They proceed when it is used for the first
    time, so that layers which are created later have the same initial weights as without kdist.
    """

    def __init__(self):
        before = random.getstate()
        super().__init__(name="global_seed_generator")
        random.setstate(before)
        self._is_used = False

    def next(self, ordered=True):
        if not self._is_used:
            self._is_used = True
            random.randint(1, int(1e9))  # as Keras does
        return super().next(ordered)


def share(model):
    """Lets the replicas of a model's strategy draw from this thread's global seed generator.

    It is created if there is none, or if it belongs to another strategy.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    strategy = model._distribute_strategy
    if generator is None or _strategy_of(generator) is not strategy:
        with tf.init_scope(), strategy.scope() if strategy else contextlib.nullcontext():
            generator = _GlobalSeedGenerator()
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    model.distribute_strategy._kdist_seed_generator = generator


def draw(keras_function, seed):
    """Returns a seed, as Keras's `draw_seed` does, in the thread of a replica."""
    generator = getattr(tf.distribute.get_strategy(), "_kdist_seed_generator", None)
    if seed is None and generator is not None:
        return generator.next(ordered=False)
    return keras_function(seed)


def _strategy_of(generator):
    """Returns the strategy in whose scope a generator was created; None without one."""
    return getattr(generator.state._value, "_distribute_strategy", None)
