"""One script per rival: it trains the workload given as JSON and prints one line of JSON.

    python -m benchmarks.rivals.tf_loop '{"model": "mlp", "precision": "float32", ...}'

The argument is a `Workload` of `benchmarks.rivals.workload`; `report` there prints the answer. Each
rival is written as an expert of its library would write it.
"""
