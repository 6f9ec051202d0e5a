"""Pipeline parallelism: stages that work on micro-batches at the same time."""
