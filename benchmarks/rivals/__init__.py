"""One script a rival: it trains the workload given as JSON and prints one line of JSON.

    python -m benchmarks.rivals.tf_loop '{"model": "mlp", "precision": "float32", ...}'

Its argument is a `Workload` of `benchmarks.rivals.workload`, its answer what `report` there says.
Each rival is written as somebody who knows its library well would write it.
"""
