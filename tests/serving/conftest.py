"""Models for the servers of the tests, exported once."""

import keras
import pytest

from kdist.serving.exporting.export import export
from tests.serving.running import running, save_mixed


def dense(seed):
    """Returns a small model whose weights depend on the seed."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(3, "softmax")(keras.layers.Dense(8, "relu")(x)))


def export_models(home):
    """Returns {name: directory}: two models of equal shapes, and one with several signatures."""
    for seed, name in enumerate(("first", "second")):
        export(dense(seed), home / name)
    save_mixed(home / "mixed" / "1")
    return {name: home / name for name in ("first", "second", "mixed")}


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """Returns the directories of `export_models`, written once."""
    return export_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def served(directories):
    """Yields a server of these models with small limits."""
    from kdist.serving.core.settings import ServerLimits

    # No ceiling: tests hold bodies of a size that this machine may not have memory for.
    limits = ServerLimits(body_bytes=1 << 20, memory_bytes=0)
    with running(directories, limits=limits) as it:
        yield it
