"""Four logical CPU devices for every test; set before TensorFlow's context exists."""

import gc

import pytest

from kdist.devices import find_devices

find_devices(4)
gc.freeze()  # TensorFlow's and Keras's own objects, which no collection need look at again


@pytest.fixture(autouse=True)
def _same_weights_and_names_in_every_test():
    import keras

    # A full collection before each test took a third of the suite's time; Python makes its own.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


@pytest.fixture(params=[1, 2, 4], ids=lambda n: f"{n} devices")
def strategy(request):
    """One device, and MirroredStrategy on two and on four."""
    from kdist.strategies import create_strategy

    name = "one_device" if request.param == 1 else "mirrored"
    return create_strategy(name, request.param)


@pytest.fixture
def mirrored():
    """MirroredStrategy on two devices."""
    from kdist.strategies import create_strategy

    return create_strategy("mirrored", 2)
