"""Models that the tests' servers serve, written once."""

import keras
import pytest

from kdist.serving.exporting import export
from tests.serving.running import running, save_mixed


def dense(seed):
    """A small model with weights of its own."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(3, "softmax")(keras.layers.Dense(8, "relu")(x)))


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """{name: directory}: two models of the same shapes, and one of several signatures."""
    home = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second")):
        export(dense(seed), home / name)
    save_mixed(home / "mixed" / "1")
    return {name: home / name for name in ("first", "second", "mixed")}


@pytest.fixture(scope="session")
def served(directories):
    """A server of these models, with small limits."""
    from kdist.serving.models import Limits

    limits = Limits(body_bytes=1 << 20, body_seconds=1.0)
    with running(directories, limits=limits) as it:
        yield it
