"""kdist's `fit` under MirroredStrategy."""

from benchmarks.rivals import workload

if __name__ == "__main__":
    given = workload.read()

    import kdist
    from benchmarks.rivals import tensorflow_parts as parts

    with kdist.create_strategy("mirrored", given.replicas).scope():
        model = parts.new_model(given)
    parts.time_fit(given, model)
