import numpy as np
import pytest
import tensorflow as tf

from kdist.batch import Batch
from kdist.data import Pipeline, from_arrays
from kdist.data.operations import as_operations


def numbered(number=50, size=4):
    """Returns a source whose example i is an image of value i with label i % 10."""
    images = np.repeat(np.arange(number, dtype="uint8"), size * size).reshape(-1, size, size, 1)
    return from_arrays(images, np.arange(number) % 10, num_classes=10)


def seen(pipeline, steps, start_step=0):
    """Returns the numbers of the examples in the batches, and checks their labels."""
    numbers = []
    for x, y in pipeline.dataset(start_step).take(steps).as_numpy_iterator():
        assert np.array_equal(x[:, 0, 0, 0] % 10, y)
        numbers.append(x[:, 0, 0, 0])
    return np.array(numbers)


def test_each_epoch_is_another_permutation():
    pipeline = Pipeline(numbered(48), Batch(4, 2))
    assert pipeline.steps_per_epoch == 6
    epochs = seen(pipeline, 18).reshape(3, 48)
    for epoch in epochs:
        assert sorted(epoch) == list(range(48))
        assert list(epoch) != sorted(epoch)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


def test_the_remainder_is_dropped_and_another_one_in_each_epoch():
    pipeline = Pipeline(numbered(50), Batch(8))
    epochs = seen(pipeline, 6 * 8).reshape(8, 48)
    dropped = [frozenset(range(50)) - set(epoch.tolist()) for epoch in epochs]
    assert all(len(set(epoch.tolist())) == 48 for epoch in epochs)
    assert len(set(dropped)) > 1


def test_the_seed_decides_the_order():
    def order(seed):
        return seen(Pipeline(numbered(), Batch(8), seed=seed), 6).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.parametrize("operations", ["", "random_flip()"])
@pytest.mark.parametrize("start", [1, 5, 6, 14])
def test_any_position_is_reached(start, operations):
    pipeline = Pipeline(numbered(), Batch(8), operations=as_operations(operations))
    assert np.array_equal(seen(pipeline, 4, start), seen(pipeline, start + 4)[start:])


def test_replicas_and_accumulation_change_nothing():
    layouts = [Batch(16), Batch(8, 2), Batch(4, 4), Batch(4, 2, 2)]
    orders = [seen(Pipeline(numbered(), batch, seed=3), 7).tolist() for batch in layouts]
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("operations", ["", "resize(3, 3)"])
@pytest.mark.parametrize(("number", "batch"), [(50, 8), (48, 8), (3, 8), (1, 1), (9, 8)])
def test_evaluation_has_each_example_once_in_order(number, batch, operations):
    pipeline = Pipeline(
        numbered(number),
        Batch(batch),
        training=False,
        operations=as_operations(operations),
        cache=False,
    )
    batches = list(pipeline.dataset().as_numpy_iterator())
    assert len(batches) == pipeline.steps_per_epoch == -(-number // batch)
    assert all(x.shape[0] == y.shape[0] == valid.shape[0] == batch for x, y, valid in batches)
    x, y, valid = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert x[valid][:, 0, 0, 0].tolist() == list(range(number))
    assert y[valid].tolist() == [i % 10 for i in range(number)]
    assert not x[~valid].any()
    assert not y[~valid].any()


@pytest.mark.parametrize("training", [True, False])
def test_shapes_are_static_and_images_stay_bytes(training):
    spec = Pipeline(numbered(), Batch(4, 2), training=training).element_spec
    assert spec[0] == tf.TensorSpec((8, 4, 4, 1), tf.uint8)
    assert spec[1] == tf.TensorSpec((8,), tf.int32)
    if not training:
        assert spec[2] == tf.TensorSpec((8,), tf.bool)


def test_augmentation_follows_from_seed_epoch_and_example():
    rng = np.random.default_rng(0)
    source = from_arrays(rng.integers(0, 255, (32, 6, 6, 1), "uint8"), np.arange(32) % 4)
    operations = as_operations("random_crop(4, 4)|random_flip()")

    def images(batch, seed=0, steps=8):
        pipeline = Pipeline(source, batch, seed=seed, operations=operations)
        return np.concatenate([x for x, _ in pipeline.dataset().take(steps).as_numpy_iterator()])

    assert np.array_equal(images(Batch(8)), images(Batch(4, 2)))
    assert not np.array_equal(images(Batch(8)), images(Batch(8), seed=1))
    # The same example differs in another epoch.
    first, second = images(Batch(32), steps=2).reshape(2, 32, -1)
    assert {tuple(image) for image in first} != {tuple(image) for image in second}


def test_random_operations_are_for_training_only():
    test = Pipeline(
        numbered(8, 6),
        Batch(4),
        training=False,
        operations=as_operations("random_flip()|resize(4, 4)"),
    )
    assert test.image_shape == (4, 4, 1)
    assert "random_flip" not in repr(test)


@pytest.mark.parametrize(
    ("cache", "expected"), [("auto", "cached"), (True, "cached"), (False, None)]
)
def test_cache_decision_is_logged_once(cache, expected, capsys):
    pipeline = Pipeline(numbered(), Batch(8), operations=as_operations("resize(2, 2)"), cache=cache)
    for _ in range(2):
        assert seen(pipeline, 3).shape == (3, 8)
    logged = capsys.readouterr().err
    assert logged.count("GB free") == (1 if expected else 0)
    assert expected is None or f"{expected} in memory" in logged


def test_images_above_the_memory_limit_are_not_cached(monkeypatch, capsys):
    monkeypatch.setattr("kdist.data.pipeline.MAX_CACHE_FRACTION", 0.0)
    pipeline = Pipeline(numbered(), Batch(8), operations=as_operations("resize(2, 2)"))
    assert "decoded in each epoch" in capsys.readouterr().err
    assert seen(pipeline, 2).shape == (2, 8)


def test_the_sharding_policy_is_set_and_the_order_kept():
    options = Pipeline(numbered(), Batch(8)).dataset().options()
    policy = options.experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.DATA
    assert options.deterministic


@pytest.mark.parametrize("operations", ["", "random_crop(3, 3)|random_flip()"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_add_up_to_the_batch(parts, training, operations):
    """Random operations do not depend on the worker that reads an example."""
    rng = np.random.default_rng(0)
    source = from_arrays(rng.integers(0, 255, (50, 4, 4, 1), "uint8"), np.arange(50), 50)
    pipeline = Pipeline(source, Batch(8), training=training, operations=operations, cache=False)

    def batches(*part):
        dataset = pipeline.dataset(2, *part).take(pipeline.steps_per_epoch)
        assert dataset.element_spec[0].shape[0] is not None
        return list(dataset.as_numpy_iterator())

    read = [batches((index, parts)) for index in range(parts)]
    for whole, *pieces in zip(batches(), *read, strict=True):
        for tensor, *of_parts in zip(whole, *pieces, strict=True):
            np.testing.assert_array_equal(np.concatenate(of_parts), tensor)
            assert max(map(len, of_parts)) - min(map(len, of_parts)) <= 1


@pytest.mark.parametrize("training", [True, False])
def test_each_example_of_an_epoch_is_in_one_part_once(training):
    pipeline = Pipeline(numbered(48), Batch(8), training=training)
    read = []
    for index in range(3):
        dataset = pipeline.dataset(part=(index, 3)).take(pipeline.steps_per_epoch)
        read.append({int(n) for x, *_ in dataset.as_numpy_iterator() for n in x[:, 0, 0, 0]})
    assert sum(map(len, read)) == 48
    assert set.union(*read) == set(range(48))


@pytest.mark.parametrize("part", [(0, 9), (2, 2), (-1, 2), (0, 0)])
def test_parts_without_rows_are_rejected(part):
    with pytest.raises(ValueError, match=r"part="):
        Pipeline(numbered(), Batch(8)).dataset(part=part)


def test_replicas_share_each_batch_evenly(mirrored):
    pipeline = Pipeline(numbered(), Batch(4, 2))
    whole = seen(pipeline, 3)
    iterator = iter(mirrored.experimental_distribute_dataset(pipeline.dataset()))
    for numbers in whole:
        shares = mirrored.experimental_local_results(next(iterator)[0])
        assert [share.shape[0] for share in shares] == [4, 4]
        assert np.concatenate([s.numpy()[:, 0, 0, 0] for s in shares]).tolist() == numbers.tolist()


def test_batch_larger_than_the_data():
    with pytest.raises(ValueError, match=r"larger than the dataset of 50 examples.*to 25 or less"):
        Pipeline(numbered(), Batch(64, 2))


def test_a_sample_is_fixed_and_prepared_as_for_evaluation():
    pipeline = Pipeline(numbered(), Batch(8), operations="resize(2, 2)|random_flip()")
    images, labels = pipeline.sample(5)
    assert images.shape == (5, 2, 2, 1)
    assert np.array_equal(images[:, 0, 0, 0] % 10, labels)
    assert np.array_equal(images, pipeline.sample(5)[0])
    assert len(pipeline.sample(100)[0]) == 50


def test_a_subset_is_fixed_by_the_seed():
    source = numbered()
    chosen = source.subset(10, seed=1).labels
    assert np.array_equal(chosen, source.subset(10, seed=1).labels)
    assert not np.array_equal(source.subset(10, seed=1).images, source.subset(10, seed=2).images)
    for number in (0, -1, 51):
        with pytest.raises(ValueError, match="--examples to a number from 1 to 50"):
            source.subset(number, seed=0)


def parallel_calls_of(dataset):
    """Returns the numbers of parallel calls of all maps in the graph of a dataset."""
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=dataset._variant_tensor)
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = {node.name: node for node in graph.node}
    maps = [node for node in graph.node if node.op == "ParallelMapDatasetV2"]
    calls = [nodes[each.input[-1].partition(":")[0]].attr["value"].tensor for each in maps]
    return [int(tf.make_ndarray(each)) for each in calls]


@pytest.mark.parametrize("operations", ["", "random_flip()"])
def test_parallel_calls_reach_the_dataset_and_change_no_batch(operations):
    tuned = Pipeline(numbered(), Batch(8), operations=operations)
    fixed = Pipeline(numbered(), Batch(8), operations=operations, parallel_calls=3)
    assert parallel_calls_of(fixed.subset(40).dataset()) == [3]
    assert parallel_calls_of(tuned.dataset()) == [tf.data.AUTOTUNE]
    assert np.array_equal(seen(fixed, 7), seen(tuned, 7))
    assert (fixed.is_vectorized, tuned.is_vectorized) == (not operations, not operations)


def test_parallel_calls_are_positive():
    with pytest.raises(ValueError, match="parallel_calls=0"):
        Pipeline(numbered(), Batch(8), parallel_calls=0)
