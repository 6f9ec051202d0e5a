"""Parts of `benchmarks.compare_clusters`.

`parts` defines the comparisons, `jobs` runs the tasks of a trial, `brake` slows one of them,
`network` connects two hosts by a slow link, and `tables` formats the results.
"""
