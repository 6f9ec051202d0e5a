"""Strategies created on the devices of this machine."""

import logging

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops

import kdist
from kdist.cluster import Cluster
from kdist.strategies import create_strategy, device_names


def test_names_make_strategies():
    assert isinstance(create_strategy("one_device"), tf.distribute.OneDeviceStrategy)
    mirrored = create_strategy("mirrored", 2)
    assert isinstance(mirrored, tf.distribute.MirroredStrategy)
    assert device_names(mirrored) == ("CPU:0", "CPU:1")
    central = create_strategy("central_storage", 2)
    assert central.num_replicas_in_sync == 2


def test_auto_logs_its_choice(capsys):
    assert create_strategy("auto").num_replicas_in_sync == 1
    assert "auto chose one_device on CPU:0: TensorFlow sees no GPU" in capsys.readouterr().err
    assert create_strategy("auto", 2).num_replicas_in_sync == 2
    assert "auto chose mirrored on CPU:0, CPU:1: as requested" in capsys.readouterr().err


@pytest.mark.parametrize(("level", "is_logged"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_reductions_are_logged_for_debugging_only(caplog, level, is_logged):
    create_strategy("mirrored", devices=2)
    place = (cross_device_ops.__file__, 1)  # TensorFlow itself logs it ten times per process
    with caplog.at_level(level, "tensorflow"):
        for number, text in ((logging.INFO, "Reduce to"), (logging.WARNING, "Slow reduction")):
            record = logging.LogRecord("tensorflow", number, *place, text, (), None)
            tf.get_logger().handle(record)
    assert ("Reduce to" in caplog.text) == is_logged
    assert "Slow reduction" in caplog.text


@pytest.mark.parametrize("reduction", ["auto", "hierarchical_copy", "reduction_to_one_device"])
def test_reductions_add(reduction):
    strategy = create_strategy("mirrored", 2, reduction=reduction)

    @tf.function
    def total():
        def on_replica():
            context = tf.distribute.get_replica_context()
            mine = tf.constant([1.0, 10.0]) * tf.cast(
                context.replica_id_in_sync_group + 1, tf.float32
            )
            return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

        return strategy.run(on_replica)

    for value in strategy.experimental_local_results(total()):
        assert value.numpy().tolist() == [3.0, 30.0]


def test_packing_reaches_the_reduction():
    strategy = create_strategy("mirrored", 2, reduction="hierarchical_copy", num_packs=3)
    assert strategy.extended._cross_device_ops._num_packs == 3


def test_strategies_of_two_sizes_live_in_one_process():
    for devices in (2, 4, 2):
        strategy = create_strategy("mirrored", devices)
        total = strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))
        )
        assert strategy.experimental_local_results(total)[0].numpy() == devices


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mirored"}, "unknown strategy 'mirored'; did you mean 'mirrored'"),
        ({"name": "mirrored", "reduction": "nccl"}, "nccl reduces between GPUs"),
        ({"name": "tpu"}, "no TPU answers.*TPU_NAME"),
        ({"name": "mirrored", "devices": ["GPU:0"]}, "no such device: GPU:0"),
        ({"name": kdist.Layout(data=2, pipeline=2), "devices": 3}, "4 devices and there are 3"),
    ],
)
def test_create_strategy_rejects(arguments, message):
    with pytest.raises(ValueError, match=message):
        create_strategy(**arguments)


def test_devices_that_do_not_exist_are_refused_before_they_are_waited_for():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:9"]).scope():
        model = kdist.Model.of(keras.Sequential([keras.layers.Dense(1)]))
        with pytest.raises(ValueError, match="device CPU:9 does not exist, but CPU:0, CPU:1"):
            model.compile("sgd", "mse")


ONE = {"worker": ["localhost:1"]}
TWO = {"worker": ["localhost:1", "localhost:2"]}
EVALUATED = {**ONE, "evaluator": ["localhost:2"]}


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (Cluster(ONE, planned_workers=4), kdist.Batch(8, 2, 4)),
        (Cluster(ONE, planned_workers=1), kdist.Batch(8, 2)),
        (Cluster(ONE), kdist.Batch(8, 2)),
        (Cluster(), kdist.Batch(8, 2)),
        # The strategy does not train with the others.
        (Cluster(TWO, planned_workers=4), kdist.Batch(8, 2)),
        (Cluster(EVALUATED, "evaluator", planned_workers=4), kdist.Batch(8, 2)),
    ],
)
def test_the_batch_of_a_job_whose_workers_may_be_missing(monkeypatch, cluster, expected):
    environment = {}
    cluster.publish(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    strategy = create_strategy("mirrored", 2)
    assert kdist.strategies.elastic_batch(strategy, local=8) == expected
