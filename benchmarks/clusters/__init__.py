"""What `benchmarks.compare_clusters` consists of.

`parts` says what is compared, `jobs` starts a trial's tasks and takes its answer, `brake` slows one
of them, `network` joins two hosts by a slow link, `tables` shows what came out.
"""
