import pytest
import tensorflow as tf

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


def test_auto_says_what_it_took(capsys):
    assert create_strategy("auto").num_replicas_in_sync == 1
    assert "auto took one_device on CPU:0: TensorFlow sees no GPU" in capsys.readouterr().out
    assert create_strategy("auto", 2).num_replicas_in_sync == 2
    assert "auto took mirrored on CPU:0, CPU:1: as asked" in capsys.readouterr().out


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


PIPELINES = kdist.Layout(data=2, pipeline=2)


def hosts(number, host="localhost"):
    return Cluster({"worker": [f"{host}:{port}" for port in range(1, number + 1)]})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "mirored"}, "unknown strategy 'mirored'; did you mean 'mirrored'"),
        ({"name": "zzz"}, "There are auto, one_device, mirrored, central_storage, tpu, multi_w"),
        (
            {"name": "parameter_server"},
            "needs tasks of the role chief and worker and ps.*launch.py",
        ),
        ({"name": "local_sgd"}, r"mirrored' or 'multi_worker': take.*compile\(…, local_steps=k\)"),
        ({"name": "multi_worker"}, "needs tasks of the role worker.* has none.*TF_CONFIG"),
        ({"name": "multi_worker", "reduction": "hierarchical_copy"}, "auto, nccl, ring and no"),
        ({"name": "one_device", "devices": 2}, "one_device takes one device, 2 were asked for"),
        (
            {"name": "mirrored", "reduction": "ring"},
            "unknown reduction 'ring'; there are auto, nccl",
        ),
        ({"name": "mirrored", "reduction": "nccl"}, "nccl reduces between GPUs"),
        ({"name": "mirrored", "num_packs": 2}, "needs --reduction=nccl or hierarchical_copy"),
        (
            {"name": "mirrored", "reduction": "hierarchical_copy", "num_packs": -1},
            "0 .no packing. or more, got -1",
        ),
        ({"name": "one_device", "reduction": "nccl"}, "options of 'mirrored'"),
        ({"name": "tpu"}, "no TPU answers.*TPU_NAME"),
        ({"name": "tpu", "devices": 2}, "takes all cores"),
        ({"name": "mirrored", "devices": ["GPU:0"]}, "no such device: GPU:0"),
        ({"name": PIPELINES, "devices": 3}, "is for 4 devices and there are 3"),
        ({"name": PIPELINES, "reduction": "ring"}, "a layout has no such choice"),
        ({"name": PIPELINES, "cluster": hosts(3)}, "cannot be divided over 3 tasks"),
        ({"name": PIPELINES, "cluster": hosts(2), "devices": 3}, "for 4 devices and there are 6"),
        ({"name": PIPELINES, "cluster": hosts(2, "10.0.0.1")}, "allow it by --allow_remote"),
        (
            {"name": PIPELINES, "cluster": Cluster({"ps": ["localhost:1", "localhost:2"]}, "ps")},
            "a layout needs tasks of the role worker",
        ),
    ],
)
def test_refuses(arguments, says):
    with pytest.raises(ValueError, match=says):
        create_strategy(**arguments)
