import numpy as np
import pytest
import tensorflow as tf

from kdist.training.replica import reduction


@pytest.mark.parametrize("pack_below", [0, 64, 1 << 20])
def test_sums_keep_their_order_when_packed(mirrored, monkeypatch, pack_below):
    monkeypatch.setattr(reduction, "_PACK_BELOW_BYTES", pack_below)

    @tf.function
    def sums():
        def on_replica():
            number = tf.cast(
                tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32
            )
            return reduction.all_reduce_sum(
                [
                    tf.fill([3], 1.0 + number),
                    tf.fill([2, 2], tf.cast(10 + number, tf.float64)),
                    tf.fill([40], 100.0 + number),
                    tf.IndexedSlices(tf.ones([1, 2]), tf.cast([number], tf.int64), [2, 2]),
                    1000.0 + number,
                ]
            )

        return mirrored.run(on_replica)

    for replica in (0, 1):
        found = [mirrored.experimental_local_results(x)[replica] for x in sums()]
        np.testing.assert_array_equal(found[0], [3.0] * 3)
        np.testing.assert_array_equal(found[1], [[21.0] * 2] * 2)
        assert found[1].dtype == tf.float64
        np.testing.assert_array_equal(found[2], [201.0] * 40)
        np.testing.assert_array_equal(tf.convert_to_tensor(found[3]), np.ones((2, 2)))
        assert float(found[4]) == 2001.0


def test_small_tensors_of_one_type_are_packed(mirrored, monkeypatch):
    sent = []

    def on_replica():
        context = tf.distribute.get_replica_context()
        all_reduce = type(context).all_reduce
        monkeypatch.setattr(
            type(context),
            "all_reduce",
            lambda self, op, values: sent.append(len(values)) or all_reduce(self, op, values),
        )
        result = reduction.all_reduce_sum([tf.ones([3]), tf.ones([2, 2]), tf.ones([5], tf.float64)])
        monkeypatch.undo()
        return result

    tf.function(lambda: mirrored.run(on_replica))()
    assert set(sent) == {1}  # a vector for each type, and a message for each vector
